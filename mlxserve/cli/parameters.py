"""Sampling parameters as a user types them: `--top-k 40`, `/set parameter top_k 40`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class ChatParameters:
    """What the user asked for; None leaves the model's own default.

    Raises:
        InvalidParameter: a value is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling())

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given."""
        values = dataclasses.asdict(self)
        del values["stop"]
        return {name: value for name, value in values.items() if value is not None}

    def given(self) -> dict[str, Any]:
        """All that was given, `stop` included, by name."""
        return self.sampling() | ({"stop": list(self.stop)} if self.stop else {})

    def with_value(self, name: str, values: list[str]) -> "ChatParameters":
        """A copy with one parameter set from words the user typed.

        Raises:
            InvalidParameter: no such parameter, not a number, or out of range.
        """
        name = OLLAMA_NAMES.get(name, name)
        if name == "stop":
            return dataclasses.replace(self, stop=tuple(values))
        if name not in NUMBERS:
            known = ", ".join([*NUMBERS, "stop"])
            raise InvalidParameter(f"unknown parameter {name!r}; known are {known}", param=name)
        if len(values) != 1:
            raise InvalidParameter(f"{name} takes one value", param=name)
        kind = NUMBERS[name]
        try:
            changed: dict[str, Any] = {name: kind(values[0])}
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise InvalidParameter(f"{name} must be {wanted}, not {values[0]!r}", param=name) from error
        return dataclasses.replace(self, **changed)


NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
    "min_tokens": int,
    "typical_p": float,
    "repetition_penalty": float,
    "repeat_last_n": int,
    "presence_penalty": float,
    "frequency_penalty": float,
}
OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""What its users have in their fingers."""
