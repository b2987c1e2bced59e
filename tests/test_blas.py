"""The BLAS is loaded before MLX, serves its products, and fails with words, never with a crash.

What a process has loaded cannot be unloaded, so everything that really loads a library runs in a process of its own.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxserve import blas

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX's own BLAS is the fast one")

REPORT = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from mlxserve import blas
info = blas.preload({threads})
print(json.dumps(info and [info.name, info.version, info.threads]))
"""

PRODUCTS = """
import numpy as np
assert "mlx.core" not in sys.modules
import mlx.core as mx
assert blas.preload(7) is info, "a second call changes nothing"
maps = open("/proc/self/maps").read()
assert "libscipy_openblas" in maps and "shim-" in maps
rng = np.random.default_rng(5)
for name, tolerance in (("float32", 1e-5), ("float64", 1e-12), ("complex64", 1e-5)):
    x, y = ((rng.standard_normal((n, 33)) + 1j * rng.standard_normal((n, 33))) for n in (5, 7))
    if name != "complex64":
        x, y = x.real, y.real
    x, y = x.astype(name), y.astype(name)
    with mx.stream(mx.cpu):
        got = np.array(mx.array(x, dtype=getattr(mx, name)) @ mx.array(y, dtype=getattr(mx, name)).T)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, x @ y.T, rtol=tolerance, atol=tolerance)
"""


def start(cache: Path, code: str, **environ: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "MLXSERVE_CACHE_DIR": str(cache), **environ}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[list | None, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[0]), err


@linux_only
def test_products_of_mlx_go_through_the_loaded_library(tmp_path):
    info, err = finish(start(tmp_path, REPORT.format(threads=1) + PRODUCTS))
    assert info is not None
    name, version, threads = info
    assert (name, threads) == ("scipy-openblas32", 1)
    assert version.startswith("OpenBLAS ")
    assert f"INFO BLAS: {name} ({version}), 1 threads" in err


@linux_only
def test_two_processes_never_race_and_leave_one_shim(tmp_path):
    processes = [start(tmp_path, REPORT.format(threads=1)) for _ in range(3)]
    assert {finish(process)[0][0] for process in processes} == {"scipy-openblas32"}
    assert [path.name.startswith("shim-") and path.suffix for path in (tmp_path / "blas").iterdir()] == [".so"]


@linux_only
def test_a_broken_shim_is_built_again(tmp_path):
    finish(start(tmp_path, REPORT.format(threads=1)))
    (shim,) = (tmp_path / "blas").iterdir()
    shim.write_bytes(b"not a library")
    info, _ = finish(start(tmp_path, REPORT.format(threads=1)))
    assert info[0] == "scipy-openblas32"
    assert shim.read_bytes().startswith(b"\x7fELF")


@linux_only
def test_too_late_after_mlx(tmp_path):
    info, err = finish(start(tmp_path, "import mlx.core\n" + REPORT.format(threads=None)))
    assert info is None
    assert "WARNING mlx.core was imported before" in err
    assert not (tmp_path / "blas").exists()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """blas.py as in a new Linux process, with an empty cache folder."""
    monkeypatch.setattr(blas, "_info", None)
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setenv("MLXSERVE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_nothing_found_is_one_warning_that_says_what_to_install(fresh, monkeypatch, caplog):
    monkeypatch.setattr(blas.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(blas.sys, "prefix", str(fresh))

    def no_library(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(blas.ctypes, "CDLL", no_library)
    with caplog.at_level(logging.DEBUG, "mlxserve.blas"):
        assert blas.preload() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for words in ("scipy-openblas32 and a C compiler", "libopenblas0-pthread", "MKL is not installed"):
        assert words in record.getMessage()


def test_the_next_library_is_tried(fresh, monkeypatch):
    def unavailable(threads):
        raise blas._Unavailable("no compiler")

    second = blas.BlasInfo("OpenBLAS", "0.3", 3)
    monkeypatch.setattr(blas, "_load_scipy_openblas", unavailable)
    monkeypatch.setattr(blas, "_load_system_openblas", lambda threads: second)
    assert blas.preload(3) is second
    assert blas.preload(4) is second


@pytest.mark.parametrize(
    ("compiler", "words"),
    [(None, "needs a C compiler"), ("#!/bin/sh\necho no such header >&2\nexit 1\n", "no such header")],
    ids=["none", "broken"],
)
def test_compiler_trouble_is_told(fresh, monkeypatch, compiler, words):
    library = fresh / "libscipy_openblas.so"
    library.touch()
    script = None
    if compiler:
        script = fresh / "cc"
        script.write_text(compiler)
        script.chmod(0o755)
    monkeypatch.setattr(blas.shutil, "which", lambda name: script and str(script))
    with pytest.raises(blas._Unavailable, match=words):
        blas._compile_shim(library, fresh / "blas" / "shim.so")
    assert not (fresh / "blas" / "shim.so").exists()


def test_no_operation_on_macos(monkeypatch, caplog):
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert blas.preload(2) is None
    assert not caplog.records
