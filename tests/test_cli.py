"""The commands, over a fake model and a fake engine (fake_cli.py)."""

import signal
import socket
import subprocess
import sys
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cli import FINISHED

from mlxserve import __version__
from mlxserve.cli import addresses, app, serve
from mlxserve.cli import run as run_command
from mlxserve.cli.chat_backend import LocalBackend
from mlxserve.cli.load_display import LoadDisplay
from mlxserve.cli.parameters import ChatParameters
from mlxserve.cli.statistics import format_duration, statistics_lines
from mlxserve.errors import ConfigError, InvalidParameter, ModelNotFound

REPOSITORY = Path(__file__).parent.parent
FAKE_CLI = REPOSITORY / "tests" / "fake_cli.py"


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a command whose stdout and stderr are pipes; what still runs after the test is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*args: str, **env: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        command = [sys.executable, str(FAKE_CLI), *args]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment | env)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


# --- all commands


def test_help_waits_for_no_heavy_import(environment: dict[str, str]) -> None:
    script = "import sys, mlxserve.cli.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True).stdout
    heavy = {"mlx", "mlx_lm", "transformers", "numpy", "httpx", "uvicorn", "starlette", "pydantic", "prompt_toolkit"}
    assert not heavy & set(loaded.decode().split())


def test_version(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "mlxserve", "--version"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stdout.decode() == f"mlxserve {__version__}\n"


def test_failure_is_one_line_and_exit_1(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "fail")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"Error: the fake failed as it was told to\n"


def test_debug_shows_the_traceback(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "fail", MLXSERVE_DEBUG="1")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert done.stderr.endswith(b"Error: the fake failed as it was told to\n")


def test_wrong_usage_exits_2(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "hello", "--top-k", "many")
    assert done.returncode == 2
    assert b"--top-k" in done.stderr


@pytest.mark.parametrize(
    ("flags", "env", "word"),
    [
        (["--temperature", "nan"], {}, b"--temperature must"),
        (["--top-p", "0"], {}, b"--top-p must"),
        (["--max-tokens", "0"], {}, b"--max-tokens must"),
        (["--port", "70000"], {}, b"--port must"),
        ([], {"MLXSERVE_BLOCK_SIZE": "12"}, b"block_size"),
        ([], {"MLXSERVE_PORT": "http"}, b"MLXSERVE_PORT"),
    ],
)
def test_impossible_settings_are_named(mlxserve: Any, flags: list[str], env: dict[str, str], word: bytes) -> None:
    done = mlxserve("run", "m", "hello", *flags, **env)
    assert (done.returncode, done.stdout) == (2 if flags else 1, b"")
    error = done.stderr.splitlines()[-1]
    assert error.startswith(b"Error: ")
    assert word in error


# --- run: one answer


def test_run_writes_the_answer_and_nothing_else(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "two", "words")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"You said: two words\n", b"")


@pytest.mark.parametrize(
    ("stdin", "words", "expected"),
    [
        (b"a diff\n", ["explain"], "a diff\n\nexplain"),
        (b"only piped\n", [], "only piped"),
        (b"", ["only words"], "only words"),
        (b"  \n", ["only words"], "only words"),
        (b"piped", [""], "piped"),
        (b"caf\xe9 \xff", [], "caf\ufffd \ufffd"),
        ("\ufeffmarked é".encode(), [], "marked é"),
        (b"  indented\n\tcode\n\n", ["why?"], "  indented\n\tcode\n\nwhy?"),
    ],
)
def test_run_puts_piped_input_before_the_prompt(mlxserve: Any, stdin: bytes, words: list[str], expected: str) -> None:
    done = mlxserve("run", "m", *words, stdin=stdin)
    assert (done.returncode, done.stdout.decode()) == (0, f"You said: {expected}\n")


@pytest.mark.parametrize("stdin", [b"", b" \n"])
def test_run_with_nothing_to_say(mlxserve: Any, stdin: bytes) -> None:
    done = mlxserve("run", "m", stdin=stdin)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"standard input is empty" in done.stderr


def test_run_with_closed_stdin(environment: dict[str, str]) -> None:
    script = f'exec "{sys.executable}" "{FAKE_CLI}" run m hello <&-'
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"You said: hello\n", b"")


def test_run_of_an_empty_prompt_only_loads(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_run_sends_the_system_message(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "recount", "--system", "be brief")
    assert done.stdout == b"system: be brief | user: recount\n"


def test_run_verbose_prints_statistics_on_stderr(mlxserve: Any) -> None:
    done = mlxserve("run", "m", "hello", "--verbose")
    assert done.stdout == b"You said: hello\n"
    assert done.stderr.decode().strip().splitlines() == statistics_lines(FINISHED, 2.5)


def test_run_leaves_bytes_alone_when_stdout_is_no_terminal(mlxserve: Any) -> None:
    assert mlxserve("run", "m", "controls").stdout.decode() == "\x1b[2Jred\x9b1m\ttab\n"


def test_run_in_an_encoding_without_the_answers_letters(process: Any) -> None:
    done = process("run", "m", "naïve", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, b"You said: na?ve\n")


def test_run_ends_quietly_when_nobody_reads_on(start: Any) -> None:
    process = start("run", "m", "flood")
    assert process.stdout.read(5) == b"spam "
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == b""


def test_ctrl_c_ends_a_single_answer_with_130(start: Any) -> None:
    process = start("run", "m", "endless")
    assert process.stdout.read(4) == b"one "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_run_tells_when_the_named_server_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def load(backend: LocalBackend, keep_alive: float | None) -> float:
        raise ModelNotFound("stopped here", model="m")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(LocalBackend, "load", load)
    monkeypatch.setattr(run_command.console, "make_stdout_lenient", lambda: None)
    monkeypatch.setattr(run_command.console, "read_stdin", lambda: "")
    monkeypatch.setattr(run_command.logs, "configure", lambda level: None)
    monkeypatch.setattr(sys, "argv", ["mlxserve", "run", "m", "hi", "--port", str(port)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    expected = f"No server with m at http://127.0.0.1:{port}; running the model in this process.\nError: stopped here\n"
    assert capsys.readouterr() == ("", expected)


# --- statistics, parameters, progress


def test_statistics_are_ollamas_lines_and_the_time_to_first_token() -> None:
    assert statistics_lines(FINISHED, 2.5) == [
        "total duration:       3.25s",
        "load duration:        2.5s",
        "prompt eval count:    40 token(s)",
        "prompt cached count:  16 token(s)",
        "prompt eval duration: 240ms",
        "prompt eval rate:     100.00 tokens/s",
        "eval count:           11 token(s)",
        "eval duration:        500ms",
        "eval rate:            20.00 tokens/s",
        "time to first token:  243.5ms (front end 1ms, queue 2ms, prefill 240ms, delivery 500µs)",
    ]


def test_statistics_leave_out_what_is_zero() -> None:
    assert not [line for line in statistics_lines(FINISHED) if line.startswith("load")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000124, "12µs"),
        (0.342546, "342.546ms"),
        (1.0, "1s"),
        (4.648123, "4.648123s"),
        (59.9999999, "1m0s"),
        (62.5, "1m2.5s"),
        (3725.0, "1h2m5s"),
    ],
)
def test_durations_as_go_prints_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_parameters_by_name() -> None:
    parameters = ChatParameters(seed=1).with_value("temperature", ["0.5"]).with_value("num_predict", ["9"])
    parameters = parameters.with_value("stop", ["a", "b c"])
    assert parameters.given() == {"temperature": 0.5, "seed": 1, "max_tokens": 9, "stop": ["a", "b c"]}
    assert parameters.sampling() == {"temperature": 0.5, "seed": 1, "max_tokens": 9}


@pytest.mark.parametrize(
    ("name", "values"),
    [("warmth", ["1"]), ("top_k", ["1.5"]), ("top_k", []), ("seed", ["1", "2"]), ("min_p", ["2"]), ("top_p", ["x"])],
)
def test_wrong_parameters_are_named(name: str, values: list[str]) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ChatParameters().with_value(name, values)


def test_download_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = LoadDisplay()
    with display.loading("m"):
        for done in (0, 5, 10, 19, 20, 95, 100):
            display.progress(done * 10**6, 100 * 10**6)
    assert capsys.readouterr().err.splitlines() == [
        "downloading m: 10 % of 100 MB",
        "downloading m: 20 % of 100 MB",
        "downloading m: 90 % of 100 MB",
        "downloading m: 100 % of 100 MB",
    ]


# --- addresses


def test_client_urls() -> None:
    assert addresses.client_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert addresses.client_url("::", 80) == "http://[::1]:80"
    assert addresses.client_url("box.local", 80) == "http://box.local:80"


def test_listen_takes_one_port_on_all_addresses_of_a_name() -> None:
    sockets = addresses.listen("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert sockets[0].getsockname()[1] > 0
    finally:
        for sock in sockets:
            sock.close()


def test_listen_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9"):
        addresses.listen("203.0.113.9", 0)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        addresses.listen("no.such.host.invalid", 0)


# --- serve


def _ready(process: subprocess.Popen[bytes]) -> str:
    """Wait until the server has announced itself; its base address."""
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert "http://" in line, process.stderr and process.stderr.read()
    return next(word for word in line.split() if word.startswith("http://"))


def _open_request(url: str) -> socket.socket:
    """A request under way, without a thread."""
    host, _, port = url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    return sock


def test_serve_announces_itself_and_drains(start: Any, tmp_path: Path) -> None:
    (tmp_path / "My-Model.Q4.gguf").touch()
    process = start("serve", "--port", "0", "--model", f"{tmp_path}/My-Model.Q4.gguf", "--model", str(tmp_path))
    line = process.stdout.readline().decode()
    url = next(word for word in line.split() if word.startswith("http://"))
    assert f"mlxserve {__version__}" in line
    assert f"serves my-model.q4, {tmp_path.name.lower()}" in line
    assert f"curl {url}/v1/chat/completions" in process.stdout.readline().decode()
    with urllib.request.urlopen(f"{url}/health", timeout=30) as health:
        assert health.headers["server"] == f"mlxserve/{__version__}"
    with _open_request(url) as request:
        request.sendall(b"GET /work?seconds=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
        assert b"1 requests are left" in process.stderr.readline()
        assert request.makefile("rb").read().endswith(b"\r\n\r\ndone"), "what runs may finish"
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in err
    with pytest.raises(ConnectionRefusedError):
        _open_request(url)


def test_serve_ends_cleanly_on_sigterm_when_idle(start: Any) -> None:
    process = start("serve", "--port", "0")
    _ready(process)
    assert b'"model": "listed"' in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in err


def test_serve_shows_how_to_ask_a_model_that_is_not_the_users_own() -> None:
    host = types.SimpleNamespace(models=lambda: [types.SimpleNamespace(name=name) for name in ("a-mine", "smollm2")])
    registry = types.SimpleNamespace(user_aliases={"a-mine": None})
    assert serve._examples(host, registry) == ["smollm2", "a-mine"]


def test_second_signal_ends_serve_at_once(start: Any) -> None:
    process = start("serve", "--port", "0", "--shutdown-timeout", "60")
    url = _ready(process)
    process.stdout.readline()
    with _open_request(url) as request:
        request.sendall(b"GET /work?seconds=60 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
        assert b"1 requests are left, they have 60 seconds" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_signal_while_a_model_loads(start: Any, tmp_path: Path) -> None:
    (tmp_path / "slow.gguf").touch()
    process = start("serve", "--port", "0", "--model", f"{tmp_path}/slow.gguf")
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"stopped while a model was loading" in err


def test_serve_with_a_broken_model(process: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").touch()
    done = process("serve", "--port", "0", "--model", f"{tmp_path}/broken.gguf")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.endswith(b"Error: broken.gguf ends in the middle of a tensor; download it again\n")


def test_serve_with_more_models_than_may_be_loaded(process: Any, tmp_path: Path) -> None:
    models = [word for number in range(3) for word in ("--model", f"{tmp_path}/{number}.gguf")]
    for number in range(3):
        (tmp_path / f"{number}.gguf").touch()
    done = process("serve", "--port", "0", *models, "--model", f"{tmp_path}/1.gguf", "--max-loaded-models", "2")
    assert done.returncode == 1
    assert b"Error: --model is there for 3 models and max_loaded_models is 2: name fewer, or raise it" in done.stderr


def test_serve_with_a_broken_models_file(process: Any, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[x]\nsource = 7\n")
    done = process("serve", "--port", "0")
    assert done.returncode == 1
    assert b"models.toml, line 2: [x] source: must be a table, not 7; write source = " in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr


def test_serve_with_an_unknown_model(process: Any) -> None:
    done = process("serve", "--port", "0", "--model", "smollm2-135")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"did you mean smollm2-135m" in done.stderr


def test_serve_on_a_port_in_use(process: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = process("serve", "--port", str(port))
    assert done.returncode == 1
    assert f"Error: port {port} of 127.0.0.1 is in use".encode() in done.stderr
    assert b"--port" in done.stderr


def test_serve_warns_of_open_doors(start: Any) -> None:
    process = start("serve", "--host", "0.0.0.0", "--port", "0")
    assert _ready(process).startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert b"MLXSERVE_API_KEY" in process.communicate(timeout=30)[1]


def test_serve_warns_of_a_key_on_the_command_line_and_never_prints_it(start: Any) -> None:
    process = start("serve", "--port", "0", "--api-key", "s3cret")
    out = _ready(process).encode() + process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert b"list of processes" in err
    assert b"$MLXSERVE_API_KEY" in out
    assert b"s3cret" not in out + err
