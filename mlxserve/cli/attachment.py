"""Text files that go along with a prompt."""

import re
from pathlib import Path

from mlxserve.errors import InvalidParameter

MAX_BYTES = 16 * 1024 * 1024
"""Far more than any context holds; what is larger was not meant."""


def read_attachment(name: str) -> str:
    """A text file as it stands in a prompt: its name, and its text between fences.

    Raises:
        InvalidParameter: it cannot be read, is not UTF-8 text, or is too large.
    """
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameter(f"{name} cannot be read: {reason}", param="file") from error
    if len(data) > MAX_BYTES:
        raise InvalidParameter(f"{name} has more than {MAX_BYTES // 2**20} MiB; give a part of it", param="file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidParameter(f"{name} is not a text file in UTF-8; convert it to text first", param="file")
    # Longer than any fence inside, so that the model sees where the file ends.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    newline = "" if text.endswith("\n") else "\n"
    return f"{path.name}:\n{fence}\n{text}{newline}{fence}"
