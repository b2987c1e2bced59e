"""A command in a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


class Terminal:
    """A command in a pseudo-terminal: type() into it, expect() text from it."""

    def __init__(self, *args: str, cache: Path, **environment: str) -> None:
        # 80 x 24 as a terminal says it; prompt-toolkit draws nothing in one of size 0.
        self._fd, child = pty.openpty()
        os.system(f"stty rows 24 cols 80 < {os.ttyname(child)}")
        env = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
        env |= {"MLXSERVE_CACHE_DIR": str(cache), "MLXSERVE_CONFIG_DIR": str(cache)}
        env |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "NO_COLOR": "1"} | environment
        command = [sys.executable, str(REPOSITORY / "tests" / "fake_cli.py"), *args]
        self._process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(child)
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str) -> str:
        """Wait for `text` and return what came before it, without escape sequences."""
        deadline = time.monotonic() + 30
        while text not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} after {self._seen!r}"
            new = self._read()
            assert new, f"ended without {text!r} after {self._seen!r}"
            self._seen += re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])", "", new.decode())
        before, _, self._seen = self._seen.partition(text)
        return before

    def wait(self) -> int:
        while self._read():
            pass
        return self._process.wait(timeout=30)

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 65536)
        except OSError:  # how Linux tells the end
            return b""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


def _own_terminal() -> None:
    """In the child: make the pseudo-terminal its controlling one, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
