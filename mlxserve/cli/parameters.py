"""Sampling parameters as a user types them: `--top-k 40`, `/set parameter top_k 40`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.generation import Reasoning
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import InvalidParameter
from mlxserve.text import json_schema


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
    schema: dict[str, Any] | bool | None = None
    """The JSON schema of the answer; None for any text."""
    think: bool | str | None = None
    """Whether the model thinks before it answers, or how much: an entry of EFFORTS. None: as it does by itself."""

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling())

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given."""
        values = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in values.items() if value is not None}

    def given(self) -> dict[str, Any]:
        """All that was given, by its name in the body of a request."""
        given = self.sampling()
        if self.stop:
            given["stop"] = list(self.stop)
        if self.schema is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.schema}}
        if isinstance(self.think, str):
            given["reasoning_effort"] = self.think
        elif self.think is not None:
            given["chat_template_kwargs"] = {"enable_thinking": self.think}
        return given

    def of_model(self) -> dict[str, Any]:
        """What was given and can be a model's default, by name: all but what goes with each request."""
        values = self.sampling() | ({"stop": list(self.stop)} if self.stop else {})
        return {name: value for name, value in values.items() if name not in PER_REQUEST}

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be."""
        return None if self.schema is None else Grammar("json_schema", self.schema, "format")

    @property
    def reasoning(self) -> Reasoning:
        if isinstance(self.think, str):
            return Reasoning(enabled=True, effort=self.think, param="think")
        return Reasoning(enabled=self.think, param="think")

    def with_think(self, text: str) -> "ChatParameters":
        """A copy that thinks (`true`), does not (`false`), or thinks so much (an entry of EFFORTS).

        Raises:
            InvalidParameter: another word.
        """
        if text not in ("true", "false", *EFFORTS):
            raise InvalidParameter(f"think is true, false, {', '.join(EFFORTS)}, not {text!r}", param="think")
        return dataclasses.replace(self, think=text if text in EFFORTS else text == "true")

    def with_format(self, text: str) -> "ChatParameters":
        """A copy whose answers are JSON: `json` for any object, else the name of a file with a schema.

        Raises:
            InvalidParameter: the file cannot be read, or has no schema that can be enforced.
        """
        if text == "json":
            return dataclasses.replace(self, schema=JSON_OBJECT)
        try:
            schema = json.loads(Path(text).read_text(encoding="utf-8"))
            json.dumps(schema, allow_nan=False)
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidParameter(
                f"the format is 'json' or a file with a JSON schema, and {text!r} cannot be read as one: {error}",
                param="format",
            ) from error
        try:
            json_schema.check(schema)
        except json_schema.UnsupportedSchema as error:
            raise InvalidParameter(f"the schema in {text} cannot be used: {error}", param="format") from error
        return dataclasses.replace(self, schema=schema)

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


EFFORTS = ("low", "medium", "high")
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
PER_REQUEST = ("seed", "max_tokens", "min_tokens")
OLLAMA_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""What its users have in their fingers."""
