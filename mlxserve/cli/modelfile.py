"""A model as a Modelfile, the text form that Ollama gives one."""

import json
from typing import Any

from mlxserve.cli.parameters import OLLAMA_NAMES

_OLLAMA_NAMES = {ours: theirs for theirs, ours in OLLAMA_NAMES.items()}


def modelfile(base: str, template: str | None, system: str | None, parameters: dict[str, Any]) -> str:
    lines = [f"FROM {base}"]
    for keyword, text in (("TEMPLATE", template), ("SYSTEM", system)):
        if text:
            lines.append(f'{keyword} """{text}"""')
    for name, value in parameters.items():
        name = _OLLAMA_NAMES.get(name, name)
        lines += [f"PARAMETER {name} {json.dumps(each)}" for each in (value if isinstance(value, list) else [value])]
    return "\n".join(lines)
