"""A request that was refused, in the words of whoever typed the command: flags and commands for fields of the API."""

import re

import typer

from mlxserve.errors import RequestError

_SWITCHES = ("think", "reasoning_effort", "chat_template_kwargs")
FLAGS = {
    **dict.fromkeys(_SWITCHES, "--think"),
    "format": "--format",
    "response_format": "--format",
    "keep_alive": "--keepalive",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "seed": "--seed",
    "max_tokens": "--max-tokens",
}
"""Field of a request -> the flag of `run` that it comes from."""


def in_flags(error: RequestError) -> Exception:
    """The error as wrong usage that names the flag; as it is where no flag is at fault."""
    flag = FLAGS.get(error.param or "")
    if flag is None or error.code == "context_length_exceeded":
        return error
    return typer.BadParameter(_naming(error, flag))


def in_commands(error: Exception) -> str:
    """The error's text for a conversation, where `/set` sets the fields."""
    param = getattr(error, "param", None)
    if param in _SWITCHES:
        return re.sub(rf"leave '?{param}'? out", "/set nothink turns it off", str(error))
    return _naming(error, "/set format") if param == "response_format" else str(error)


def _naming(error: Exception, name: str) -> str:
    """The text with `name` in place of the field."""
    text, count = re.subn(rf"'{error.param}'|\b{error.param}\b", name, str(error))  # type: ignore[attr-defined]
    return text if count else f"{name}: {text}"
