"""Ollama's Modelfile, as far as it has a meaning here: FROM, SYSTEM, TEMPLATE, PARAMETER, LICENSE.

An instruction in any case and its value: the rest of the line, in quotes or not, or a text of several lines between
triple quotes. Lines that begin with # are comments.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.errors import ConfigError, InvalidParameter
from mlxserve.store.model_parameters import parse_parameters

REFUSED = {
    "adapter": "an adapter is named in models.toml (adapter = { path = ... }) or behind the model: FROM MODEL+ADAPTER",
    "message": "messages to begin with are not supported; put what they should do into SYSTEM",
    "requires": "it names a version of Ollama; leave it out",
}
INSTRUCTIONS = ("from", "system", "template", "license")


@dataclass(frozen=True, slots=True)
class Modelfile:
    base: str | None = None
    system: str | None = None
    template: str | None = None
    license: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Values as text; `stop` a list of texts."""


def read_modelfile(file: Path) -> Modelfile:
    """Read a Modelfile; a path in FROM is relative to its folder.

    Raises:
        ConfigError: it cannot be read, or a line is wrong; names file and line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    found = parse_modelfile(text, str(file))
    if found.base is not None and found.base.startswith(("./", "../")):
        return Modelfile(
            str((file.parent / found.base).resolve()), found.system, found.template, found.license, found.parameters
        )
    return found


def parse_modelfile(text: str, name: str) -> Modelfile:
    """`name` is the file's, for errors. Raises as read_modelfile()."""
    values: dict[str, str] = {}
    parameters: dict[str, Any] = {}
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, line = number + 1, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        key, rest = word.lower(), rest.strip()
        if key in REFUSED:
            raise ConfigError(f"{name}, line {start}: {word}: {REFUSED[key]}")
        if key == "parameter":
            parameter, _, rest = rest.partition(" ")
            rest = rest.strip()
        elif key not in INSTRUCTIONS:
            known = ", ".join([each.upper() for each in INSTRUCTIONS] + ["PARAMETER"])
            raise ConfigError(f"{name}, line {start}: unknown instruction {word!r} (known: {known})")
        if rest.startswith('"""'):
            block = [rest[3:]]
            while '"""' not in block[-1]:
                if number == len(lines):
                    raise ConfigError(f'{name}, line {start}: {word}: the text has no end; close it with """')
                block.append(lines[number])
                number += 1
            last, _, behind = block[-1].partition('"""')
            if behind.strip():
                raise ConfigError(f'{name}, line {number}: {word}: nothing may follow the closing """')
            rest = "\n".join([*block[:-1], last])
        elif len(rest) > 1 and rest[0] == rest[-1] == '"':
            rest = rest[1:-1]
        if not rest.strip():
            raise ConfigError(f"{name}, line {start}: {word}: has no value")
        if key == "parameter":
            try:
                parse_parameters({parameter: rest})
            except InvalidParameter as error:
                raise ConfigError(f"{name}, line {start}: {word}: {error}") from error
            if parameter == "stop":
                parameters.setdefault("stop", []).append(rest)
            else:
                parameters[parameter] = rest
        elif key in values and key != "license":
            raise ConfigError(f"{name}, line {start}: {word}: is there twice")
        else:
            values[key] = f"{values[key]}\n{rest}" if key in values else rest
    return Modelfile(
        values.get("from"), values.get("system"), values.get("template"), values.get("license"), parameters
    )
