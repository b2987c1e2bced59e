"""Default parameters of a model, as `create` and Modelfiles name them: Ollama's names and our own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import InvalidParameter
from mlxserve.store.alias_file import SAMPLING_KEYS, WHOLE_SAMPLING_KEYS

_OUR_NAMES = {"repeat_penalty": "repetition_penalty", "num_ctx": "context_length"}
_PER_REQUEST = {"seed", "num_predict", "num_keep", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Parameters:
    sampling: dict[str, float | int]
    stop: tuple[str, ...]
    context_length: int | None


def parse_parameters(values: Mapping[str, Any]) -> Parameters:
    """Checked values. Numbers may be text; `stop` is a text or a list of them.

    Raises:
        InvalidParameter: an unknown name or impossible value; `param` is the name as it was given.
    """
    sampling: dict[str, Any] = {}
    stop: tuple[str, ...] = ()
    context_length = None
    for given, value in values.items():
        name = _OUR_NAMES.get(given, given)
        if name == "stop":
            stop = _texts(value)
        elif name == "context_length":
            context_length = int(_number(given, value, whole=True))
            if context_length < 1:
                raise InvalidParameter(f"{given} must be a positive whole number, not {value!r}", param=given)
        elif name in SAMPLING_KEYS:
            sampling[name] = _number(given, value, whole=name in WHOLE_SAMPLING_KEYS)
            try:
                SamplingParams(**{name: sampling[name]})
            except InvalidParameter as error:
                raise InvalidParameter(f"{given}: {error}", param=given) from error
        elif given in _PER_REQUEST:
            raise InvalidParameter(f"{given} is no default a model can have; send it with the request", param=given)
        else:
            known = ", ".join([*SAMPLING_KEYS, "stop", "context_length", *_OUR_NAMES])
            raise InvalidParameter(f"unknown parameter {given!r} (known: {known})", param=given)
    return Parameters(sampling, stop, context_length)


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise InvalidParameter(f"stop must be a text or a list of texts, not {value!r}", param="stop")
    return tuple(texts)


def _number(name: str, value: Any, *, whole: bool) -> float | int:
    kind = "a whole number" if whole else "a number"
    if isinstance(value, str):
        try:
            return int(value) if whole else float(value)
        except ValueError:
            raise InvalidParameter(f"{name} must be {kind}, not {value!r}", param=name) from None
    if type(value) is int or (type(value) is float and (not whole or value.is_integer())):
        return int(value) if whole else value
    raise InvalidParameter(f"{name} must be {kind}, not {value!r}", param=name)
