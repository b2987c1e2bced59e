"""What clients send to look at, fetch and change models, as pydantic models."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mlxserve.api.ollama.options import Options
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.errors import InvalidParameter

MAX_TEXT_LENGTH = 1_000_000


def _no_path(name: str) -> str:
    if name.startswith(("/", ".", "~")) or "\\" in name or ".." in name or not name.isprintable():
        raise PydanticCustomError("name_error", "a model's name is no path and has no control characters")
    return name


def _license_text(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return "\n\n".join(value)
    return value


StoreName = Annotated[str, Field(max_length=200), AfterValidator(_no_path)]
Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]


class NamedModel(WireModel):
    """A body that names one model, by either of the two fields that clients have for it."""

    model: StoreName | None = None
    name: StoreName | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not self.named:
            raise InvalidParameter("Missing required parameter: 'model'.", param="model")
        return self

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class ShowRequest(NamedModel):
    verbose: bool | None = None
    system: Annotated[Any, unsupported("")] = None
    template: Annotated[Any, unsupported("")] = None
    options: Annotated[Any, unsupported({})] = None


class PullRequest(NamedModel):
    stream: bool | None = None
    """None: true."""
    insecure: Annotated[Any, unsupported(False)] = None
    username: Annotated[Any, unsupported("")] = None
    password: Annotated[Any, unsupported("")] = None


class DeleteRequest(NamedModel):
    pass


class CopyRequest(WireModel):
    source: Annotated[StoreName, Field(min_length=1)]
    destination: Annotated[StoreName, Field(min_length=1)]


class CreateRequest(NamedModel):
    base: Annotated[str, Field(alias="from", min_length=1, max_length=1000)]
    """A model's name, or the path of a folder or .gguf file in one of the folders that the server allows."""
    stream: bool | None = None
    """None: true."""
    system: Text | None = None
    template: Text | None = None
    license: Annotated[Text | None, BeforeValidator(_license_text)] = None
    parameters: Options | None = None

    files: Annotated[Any, unsupported({})] = None
    adapters: Annotated[Any, unsupported({})] = None
    messages: Annotated[Any, unsupported([])] = None
    quantize: Annotated[Any, unsupported("")] = None
    modelfile: Annotated[Any, unsupported("")] = None
    path: Annotated[Any, unsupported("")] = None
