"""`mlxserve top`: frames of canned answers, and the command against servers good and bad."""

import http.server
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import Gate, held
from helpers_http import serving
from helpers_served import FakeBuild
from rich.console import Console

from mlxserve.cli import app, top_view
from mlxserve.config import ServerConfig

STAGES = {"front_end": 0.1, "queue": 0.2, "prefill": 0.3, "decode": 0.3, "delivery": 0.1}


def request(**fields: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "state": "done",
        "received": 100.0,
        "stages": STAGES,
        "total": 1.0,
        "ttft": 0.6,
        "num_prompt_tokens": 20,
        "num_cached_tokens": 5,
        "num_computed_tokens": 30,
        "num_generated_tokens": 11,
        "num_preemptions": 0,
        "priority": 0,
        "outcome": "stop",
    } | fields


def step(**fields: Any) -> dict[str, Any]:
    return {"time": 99.0, "measured": 0.1, "num_rows": 2, "num_prefill_tokens": 0} | fields


def text_of(renderable: Any, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def model(name: str, **fields: Any) -> dict[str, Any]:
    blocks = {"used": 1, "shared": 0, "cached": 10, "max": 40}
    return {"model": name, "num_running": 2, "num_waiting": 1, "blocks": blocks, "steps": [step()]} | fields


def framed(requests: dict[str, Any], models: list[dict[str, Any]], width: int = 140) -> str:
    """A frame for 30 lines."""
    console = Console(width=width, height=30)
    return text_of(top_view.frame(requests, {"now": 100.0, "models": models}, console, "title"), width)


def test_a_bar_gives_each_stage_its_share() -> None:
    assert top_view.stage_bar(STAGES, 10).plain == "fqqpppdddw"
    assert top_view.stage_bar(STAGES | dict.fromkeys(STAGES, 0.0), 10).plain == ""
    assert top_view.stage_bar(dict.fromkeys(STAGES, 0.0) | {"queue": 3.0}, 4).plain == "qqqq"


def test_the_line_of_a_model() -> None:
    old = step(time=10.0, num_rows=1000)
    steps = [old, step(time=98.1), step(time=99.0, num_prefill_tokens=64), step(time=99.9)]
    line = top_view.model_line(model("m", steps=steps), 100.0, 200).plain
    assert "running 2  waiting 1" in line
    assert "steps/s 1.5  decode tok/s 3.0  prefill tok/s 32.0  step p50 100 ms" in line
    assert "[#======.................] 1 used, 10 cached of 40" in line
    assert "idle" in top_view.model_line(model("m", steps=[old]), 100.0, 200).plain


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_blocks_of_a_model_stand_on_one_line(width: int) -> None:
    line = top_view.model_line(model("m" * 20, steps=[]), 100.0, width).plain.splitlines()[-1]
    assert (line.startswith("blocks ["), line.endswith("of 40"), len(line) <= width) == (True, True, True)


def test_a_narrow_terminal_gets_fewer_numbers() -> None:
    rows = [request(id="chatcmpl-0123456789", state="done")]
    heads = {}
    for width in (40, 60, 80):
        lines = text_of(top_view.requests_table(rows, width), width).splitlines()
        assert max(map(len, lines)) <= width
        heads[width] = lines[0].split()[3:]
    assert heads == {
        40: ["TTFT"],
        60: ["total", "TTFT", "prompt", "out"],
        80: ["total", "TTFT", "prompt", "cached", "out"],
    }


def test_percentiles_are_of_whole_answers() -> None:
    done = [request(total=float(second), ttft=second / 10) for second in range(1, 101)]
    others = [request(outcome="cancelled", total=9e9), request(outcome="QueueFull", total=9e9, ttft=None)]
    lines = text_of(top_view.percentiles_table(done + others)).splitlines()
    assert lines[0].split() == ["100", "answers", "p50", "p95", "p99"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.strip()}
    assert rows["E2E"] == ["50.0", "s", "95.0", "s", "99.0", "s"]
    assert rows["TTFT"] == ["5000", "ms", "9500", "ms", "9900", "ms"]
    assert rows["TPOT"] == ["30", "ms"] * 3


def test_a_frame_fits_its_height_and_says_what_it_leaves_out() -> None:
    requests = {"now": 100.0, "requests": [request(id=f"r{index}", state="queued") for index in range(60)]}
    text = framed(requests, [])
    assert len(text.splitlines()) == 30
    assert "no model is loaded" in text
    assert "more (60 under way)" in text


def test_several_models() -> None:
    rows = [request(id=f"chatcmpl-{'0' * 32}-{index}", model=f"model-{index % 2}") for index in range(4)]
    text = framed({"now": 100.0, "requests": rows}, [model(f"model-{index}") for index in range(2)])
    first, second = [line for line in text.splitlines() if "running 2  waiting 1" in line]
    assert (first.split()[0], second.split()[0]) == ("model-0", "model-1")
    assert "4 answers of 2 models" in text
    shown = [line.split()[:2] for line in text.splitlines() if line.startswith("chatcmpl")]
    assert [name for _, name in shown] == ["model-0", "model-1"] * 2
    assert len({short for short, _ in shown}) == 4, "told apart, though they differ at their ends only"
    assert "model-0" not in text_of(top_view.requests_table([request(model="model-0")], 140))


def test_rows_of_a_narrow_terminal() -> None:
    rows = [request(id="chatcmpl-" + "0" * 32 + "-7", model="org/a-long-name-4bit", outcome="RequestTimeout")]
    (line,) = text_of(top_view.requests_table(rows, 80, with_model=True), 80).splitlines()[1:]
    assert line.split()[:4] == ["chatcm…0-7", "org/a-…bit", "RequestTi…", "fqqpppdddw"]
    assert line.split()[4:] == ["1000", "ms", "600", "ms", "20", "5", "11"]
    rows.append(request(num_preemptions=3))
    assert [line.split()[-1] for line in text_of(top_view.requests_table(rows, 100), 100).splitlines() if line] == [
        *("preempted", "11", "3")
    ]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("num_models", [1, 2, 3, 20])
def test_many_models_leave_room_for_requests(width: int, num_models: int) -> None:
    models = [model(f"org/a-model-with-a-name-{index}-4bit") for index in range(num_models)]
    text = framed({"now": 100.0, "requests": [request() for _ in range(40)]}, models, width)
    lines = text.splitlines()
    assert len(lines) == 30
    assert sum(line.startswith("chatcmpl") for line in lines) >= 3
    num_shown = sum("a-model-with-a-name" in line for line in lines)
    assert num_shown >= 1
    assert num_shown == num_models or f"... and {num_models - num_shown} more models" in text


def test_what_is_being_loaded_and_waited_for() -> None:
    rows = [request(model=name, id=name, state="loading", outcome=None, ttft=None) for name in ("one", "two", "one")]
    text = framed({"now": 100.0, "requests": rows}, [])
    assert text.splitlines()[1] == "loading one, two  waiting 3"


def test_models_that_come_and_go_between_two_looks() -> None:
    rows = [request(model="gone", id="a"), request(model="here", id="b", state="prefill", outcome=None, ttft=None)]
    text = framed({"now": 100.0, "requests": rows}, [model("new", steps=[]), model("here")])
    assert [line.split()[:3] for line in text.splitlines() if line[:2] in ("a ", "b ")] == [
        ["a", "gone", "stop"],
        ["b", "here", "prefill"],
    ]
    assert "idle" in next(line for line in text.splitlines() if line.startswith("new"))
    text = framed({"now": 100.0, "requests": rows}, [])
    assert "no model is loaded" in text


def test_embeddings_are_no_answers() -> None:
    stages = STAGES | {"decode": 0.0}
    embedding = request(ttft=None, num_generated_tokens=0, stages=stages, total=0.5, num_cached_tokens=0)
    lines = text_of(top_view.percentiles_table([request(), *[embedding] * 9])).splitlines()
    rows = [line.split() for line in lines]
    assert rows[0][:2] == ["1", "answer"]
    assert ["E2E", *["1000", "ms"] * 3] in rows
    assert ["E2E", "of", "9", "without", "tokens", *["500", "ms"] * 3] in rows
    lines = text_of(top_view.percentiles_table([embedding])).splitlines()
    assert [line.split()[1:] for line in lines[1:3]] == [["-"] * 3] * 2
    assert " stop " in text_of(top_view.requests_table([embedding], 140))


def test_what_a_client_chose_cannot_move_the_cursor() -> None:
    text = text_of(top_view.requests_table([request(id="\x1b[2J[bold]x\n", outcome="\x07stop")], 140))
    assert "[2J[bold]x" in text
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


def run_top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["mlxserve", "top", *args])
    with pytest.raises(SystemExit) as ended:
        app.main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_one_frame_of_a_server(
    build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    with serving(build, tmp_path) as server, held(Gate()) as gate:
        whole = server.complete(max_tokens=3).json()["id"]
        embedded = server.client.post("/v1/embeddings", json={"model": "one", "input": ["the cat", "the dog"]})
        assert embedded.status_code == 200
        server.runner.before_step = gate
        thread = threading.Thread(target=server.complete, kwargs={"max_tokens": 2})
        thread.start()
        gate.wait()
        code, out, err = run_top(monkeypatch, capsys, "--once", "--port", server.address.rpartition(":")[2])
        gate.open()
        thread.join()
    assert (code, err) == (0, "")
    assert "running 1  waiting 0" in out
    lines = out.splitlines()
    (prefilling,) = [line for line in lines if line.split()[1:2] == ["prefill"] and not line.startswith("stages:")]
    (ended,) = [line for line in lines if line.startswith(f"{whole[:15]}…{whole[-8:]}")]
    assert lines.index(prefilling) < lines.index(ended)
    assert "length" in ended
    assert "1 answer " in out
    assert "E2E of 2 without tokens" in out
    assert [line.split()[1] for line in lines if line.startswith("embd-")] == ["stop"] * 2
    assert "\x1b" not in out


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        code, out, err = run_top(monkeypatch, capsys, "--once", "--port", str(unused.getsockname()[1]))
    assert (code, out) == (1, "")
    assert "mlxserve serve" in err
    assert "--port" in err


def test_the_wrong_key(
    build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(build, tmp_path, server_config=ServerConfig(api_key="right")) as server:
        port = server.address.rpartition(":")[2]
        code, _, err = run_top(monkeypatch, capsys, "--once", "--port", port)
        assert code == 1
        assert "MLXSERVE_API_KEY" in err
        monkeypatch.setenv("MLXSERVE_API_KEY", "right")
        assert run_top(monkeypatch, capsys, "--once", "--port", port)[0] == 0


@contextmanager
def another_program(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b"nothing"), (200, b"<html>"), (200, b"[1]"), (500, b"{}"), (200, b"{}")],
)
def test_another_program(
    status: int, body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with another_program(status, body) as port:
        code, _, err = run_top(monkeypatch, capsys, "--once", "--port", port)
    assert code == 1
    assert "no mlxserve, or an older one" in err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_a_wrong_interval(interval: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_top(monkeypatch, capsys, "--interval", interval)
    assert code == 2
    assert "--interval" in err
