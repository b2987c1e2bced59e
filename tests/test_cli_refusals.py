"""Refused requests in the words of the command line, and an end by Ctrl-C whenever it comes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_cli import FakeBackend

from mlxserve.cli import load_display, models
from mlxserve.cli import run as run_command
from mlxserve.cli.chat_backend import LocalBackend
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.refusals import in_commands, in_flags
from mlxserve.errors import EngineError, InvalidParameter, ModelNotFound, RequestError

NO_THINKING = "this model does not support thinking; leave '{}' out"


@pytest.mark.parametrize(
    ("param", "text", "shown"),
    [
        ("reasoning_effort", NO_THINKING, "this model does not support thinking; leave --think out"),
        ("chat_template_kwargs", NO_THINKING, "this model does not support thinking; leave --think out"),
        ("temperature", "'{}' must be at most 2", "--temperature must be at most 2"),
        ("top_p", "{} must be at most 1", "--top-p must be at most 1"),
        ("response_format", "the schema is too large", "--format: the schema is too large"),
    ],
)
def test_fields_are_told_as_flags(param: str, text: str, shown: str) -> None:
    error = in_flags(InvalidParameter(text.format(param), param=param))
    assert isinstance(error, typer.BadParameter)
    assert error.message == shown


@pytest.mark.parametrize(
    ("param", "code"), [("messages", None), (None, None), ("max_tokens", "context_length_exceeded")]
)
def test_what_no_flag_is_at_fault_for_stays(param: str | None, code: str | None) -> None:
    error = RequestError("too long", param=param, code=code)
    assert in_flags(error) is error


def test_a_conversation_is_told_its_commands() -> None:
    error = InvalidParameter(NO_THINKING.format("chat_template_kwargs"), param="chat_template_kwargs")
    assert in_commands(error) == "this model does not support thinking; /set nothink turns it off"
    assert in_commands(EngineError("broken")) == "broken"


def test_a_servers_refusal_names_the_flag(mlxserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeBackend):
        async def _answer(self, messages: Any) -> Any:
            raise InvalidParameter("temperature must be at most 2", param="temperature")
            yield

    async def open_backend(model: str, **options: Any) -> FakeBackend:
        return Refusing()

    monkeypatch.setattr(run_command, "open_backend", open_backend)
    done = mlxserve("run", "m", "--temperature", "50", "hello")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == b"Error: Invalid value: --temperature must be at most 2"


class Library:
    def __init__(self, *capabilities: str) -> None:
        self.capabilities = capabilities

    def show(self, name: str, *, allow_paths: bool) -> "Library":
        if name == "elsewhere":
            raise ModelNotFound("it is not on this machine", model=name)
        return self


@pytest.mark.parametrize(
    ("model", "capabilities", "think", "is_refused"),
    [
        ("m", ("completion",), "true", True),
        ("m", ("completion",), "low", True),
        ("m", ("completion",), "false", False),
        ("m", ("completion", "thinking"), "true", False),
        ("elsewhere", (), "true", False),
    ],
)
def test_a_model_that_cannot_think_is_not_loaded_for_it(
    mlxserve: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    capabilities: tuple[str, ...],
    think: str,
    is_refused: bool,
) -> None:
    class Loading(LocalBackend):
        async def load(self, keep_alive: float | None = None) -> float:
            raise EngineError("the weights are loaded")

    async def open_backend(model: str, **options: Any) -> LocalBackend:
        return Loading(model, options["engine_config"])

    monkeypatch.setattr(run_command, "open_backend", open_backend)
    monkeypatch.setattr(models, "open_library", lambda: Library(*capabilities))
    done = mlxserve("run", model, f"--think={think}", "hello")
    assert (done.returncode, b"leave --think out" in done.stderr) == ((2, True) if is_refused else (1, False))
    assert (b"the weights are loaded" in done.stderr) != is_refused


# --- what takes long


def test_a_slow_load_is_told_where_there_is_no_spinner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = asyncio.Event()
    monkeypatch.setattr(load_display, "TELL_SECONDS", 0.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(load_display, "notice", lambda text: (print(text), loop.call_soon_threadsafe(told.set)))
        with LoadDisplay().loading("smollm2-135m"):
            await told.wait()

    asyncio.run(main())
    assert capsys.readouterr().out == "loading smollm2-135m ...\n"
    monkeypatch.setattr(load_display, "TELL_SECONDS", 3600.0)
    with LoadDisplay().loading("smollm2-135m"):
        pass
    assert capsys.readouterr().out == ""


# --- Ctrl-C

LINGER = """
import sys, time
def linger():
    print("now", flush=True)
    for _ in range(600):
        time.sleep(0.1)
"""
SLOW_IMPORT = """
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "mlxserve.cli.app":
            linger()
sys.meta_path.insert(0, Slow())
"""
SLOW_END = """
import atexit
atexit.register(linger)
"""


@pytest.mark.parametrize("script", [SLOW_IMPORT, SLOW_END])
def test_ctrl_c_is_quiet_while_python_imports_and_ends(script: str, environment: dict[str, str]) -> None:
    code = f"{LINGER}\n{script}\nsys.argv = ['mlxserve', '--version']\nfrom mlxserve import entry\nentry.main()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, env=environment)
    assert process.stdout is not None
    try:
        assert any(line == b"now\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, b"")


# --- a disk that is full


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_told_of(environment: dict[str, str]) -> None:
    environment = {name: value for name, value in environment.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mlxserve", "config"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"Error: standard output cannot be written: {os.strerror(28)}\n", done.stderr.decode())


def test_transformers_is_not_to_miss_pytorch(mlxserve: Any) -> None:
    mlxserve("--version")
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"


@pytest.mark.parametrize("words", [("--runs", "0"), ("--workload", "none"), ("--url", "ftp://x"), ("--streams", "a")])
def test_wrong_flags_of_bench_are_wrong_usage(mlxserve: Any, words: tuple[str, str]) -> None:
    done = mlxserve("bench", *words)
    assert (done.returncode, words[1].encode() in done.stderr) == (2, True)


def test_parameters_say_which_flags_they_are() -> None:
    given = ChatParameters(
        temperature=1.0, top_p=0.5, top_k=1, min_p=0.1, seed=1, max_tokens=2, schema=True, think=True
    )
    for field in given.given():
        assert isinstance(in_flags(InvalidParameter("wrong", param=field)), typer.BadParameter), field
