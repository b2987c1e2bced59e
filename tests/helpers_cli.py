"""What a command did."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    returncode: int | str | None
    stdout: bytes
    stderr: bytes
