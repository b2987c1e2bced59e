"""What all bodies of requests have in common."""

from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError


def unsupported(*neutral: Any) -> AfterValidator:
    """Marks a field that is known and not supported yet: null and the `neutral` values pass, others are refused."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # True == 1 and False == 0 in Python, but not on the wire.
        same = (value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral)
        if value is None or any(same):
            return value
        raise PydanticCustomError("unsupported_parameter", "this server does not support it yet; leave it out")

    return AfterValidator(check)


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)
