"""A fast BLAS for MLX on Linux, put in place before `mlx.core` is imported.

The Linux wheel of MLX links the reference BLAS, whose matrix products run at a few GFLOP/s. libmlx takes `cblas_sgemm`,
`cblas_dgemm` and `cblas_cgemm` from the first library in the process's global scope that defines them, so a library
loaded earlier with RTLD_GLOBAL serves them instead. On macOS MLX uses Metal and Accelerate, and there is nothing to do.
"""

import contextlib
import ctypes
import ctypes.util
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxserve.config import cache_dir

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT = 60.0
"""Seconds the C compiler gets for the shim; it needs a fraction of one."""

# scipy-openblas32 puts `scipy_` before every symbol, so that it can live beside another BLAS. In the C ABI its
# enumerations are int, and so is blasint in this build.
SHIM_SOURCE = """\
typedef const void *array;

#define FORWARD(name, scalar)                                                                                  \\
    void scipy_##name(int, int, int, int, int, int, scalar, array, int, array, int, scalar, void *, int);      \\
    void name(int order, int trans_a, int trans_b, int m, int n, int k, scalar alpha, array a, int lda,        \\
              array b, int ldb, scalar beta, void *c, int ldc) {                                               \\
        scipy_##name(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                   \\
    }

FORWARD(cblas_sgemm, float)
FORWARD(cblas_dgemm, double)
FORWARD(cblas_cgemm, array)
"""


@dataclass(frozen=True, slots=True)
class BlasInfo:
    """The BLAS that serves MLX's matrix products."""

    name: str
    """scipy-openblas32, OpenBLAS or MKL."""
    version: str
    """The library's own words, with the name of the kernels it picked for this processor."""
    threads: int


class _Unavailable(Exception):
    """This BLAS cannot be used; the message says why."""


_lock = threading.Lock()
_info: BlasInfo | None = None


def preload(threads: int | None = None) -> BlasInfo | None:
    """Load the best BLAS of this machine for MLX, before anything imports `mlx.core`. Calling again is harmless.

    Args:
        threads: Threads a product may use; None leaves it to the library: one for each core, or what its own
            environment variable (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS) says.

    Returns:
        What was loaded; None on macOS, and where nothing was loaded and MLX keeps its own BLAS (a warning says why).
    """
    global _info
    if sys.platform != "linux":
        return None
    with _lock:
        if _info is not None:
            return _info
        if "mlx.core" in sys.modules:
            logger.warning("mlx.core was imported before the BLAS was chosen; matrix products will be slow")
            return None
        reasons = []
        for load in (_load_scipy_openblas, _load_system_openblas, _load_mkl):
            try:
                _info = load(threads)
            except _Unavailable as reason:
                reasons.append(str(reason))
                continue
            logger.info("BLAS: %s (%s), %d threads", _info.name, _info.version, _info.threads)
            return _info
        logger.warning(
            "no fast BLAS found, matrix products will be about ten times slower; install the Python package "
            "scipy-openblas32 and a C compiler, or the system's OpenBLAS (Debian: libopenblas0-pthread). Tried: %s",
            "; ".join(reasons),
        )
        return None


def _load_scipy_openblas(threads: int | None) -> BlasInfo:
    library = _find_scipy_openblas()
    shim = _shim_path(library)
    try:
        if not shim.exists():
            _compile_shim(library, shim)
        try:
            handle = ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            _compile_shim(library, shim)
            handle = ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _Unavailable(f"scipy-openblas32: {error}") from error
    return _openblas_info("scipy-openblas32", handle, "scipy_openblas_", threads)


def _find_scipy_openblas() -> Path:
    # Importing the package would load the library by itself; only the file's place is needed.
    spec = importlib.util.find_spec("scipy_openblas32")
    for location in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(location, "lib").glob("libscipy_openblas*.so*")):
            return library.resolve()
    raise _Unavailable("scipy-openblas32 is not installed")


def _shim_path(library: Path) -> Path:
    """Where the shim for exactly this library file and machine belongs."""
    stat = library.stat()
    key = "\0".join([str(library), str(stat.st_size), str(stat.st_mtime_ns), platform.machine(), SHIM_SOURCE])
    return cache_dir() / "blas" / f"shim-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _compile_shim(library: Path, shim: Path) -> None:
    """Build the shim under a temporary name and rename it, so that a second process sees all of it or none.

    Raises:
        _Unavailable: no compiler, or it failed.
        OSError: the cache folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise _Unavailable("scipy-openblas32 needs a C compiler (cc) once, and there is none")
    shim.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shim-", dir=shim.parent) as folder:
        source, built = Path(folder, "shim.c"), Path(folder, "shim.so")
        source.write_text(SHIM_SOURCE, encoding="ascii")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built), str(source), str(library)]
        command += ["-Wl,--no-undefined", f"-Wl,-rpath,{library.parent}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
        except subprocess.CalledProcessError as error:
            raise _Unavailable(f"scipy-openblas32: {compiler} failed: {error.stderr.strip()[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise _Unavailable(f"scipy-openblas32: {compiler} did not finish in {COMPILE_TIMEOUT:g} s") from error
        os.replace(built, shim)


def _load_system_openblas(threads: int | None) -> BlasInfo:
    handle = _open_global("the system's OpenBLAS", ["libopenblas.so.0"])
    return _openblas_info("OpenBLAS", handle, "openblas_", threads)


def _openblas_info(name: str, handle: ctypes.CDLL, prefix: str, threads: int | None) -> BlasInfo:
    if threads is not None:
        handle[f"{prefix}set_num_threads"](ctypes.c_int(threads))
    version = _text(handle[f"{prefix}get_config"])
    core = _text(handle[f"{prefix}get_corename"])
    if core not in version.split():
        version = f"{version} {core}"
    return BlasInfo(name, version, int(handle[f"{prefix}get_num_threads"]()))


def _load_mkl(threads: int | None) -> BlasInfo:
    # pip puts the library into the environment's lib folder, where the loader does not look by itself.
    installed = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"), reverse=True)
    handle = _open_global("MKL", [*map(str, installed), "libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so"])
    if threads is not None:
        handle.MKL_Set_Num_Threads(ctypes.c_int(threads))
    buffer = ctypes.create_string_buffer(200)
    handle.mkl_get_version_string(buffer, ctypes.c_int(len(buffer)))
    return BlasInfo("MKL", buffer.value.decode(errors="replace").strip(), int(handle.MKL_Get_Max_Threads()))


def _open_global(title: str, names: list[str]) -> ctypes.CDLL:
    for name in names:
        with contextlib.suppress(OSError):
            handle = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            if hasattr(handle, "cblas_sgemm"):
                return handle
    raise _Unavailable(f"{title} is not installed")


def _text(function: Callable[[], bytes]) -> str:
    function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return function().decode(errors="replace").strip()
