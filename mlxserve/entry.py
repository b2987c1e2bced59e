"""Where the command begins: Ctrl-C ends it quietly from the first import to the last thing done at exit."""

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""The shell's code for a command that Ctrl-C ended."""


def main() -> None:
    """Run the command of sys.argv and exit, see cli.app.main."""
    signal.signal(signal.SIGINT, _leave)
    from mlxserve.cli import app

    # The commands have their own ways to end, which begin with a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app.main()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        # Python has threads to wait for and modules to tear down, and would show where it was.
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
