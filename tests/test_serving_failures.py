"""The real app on the real host and engine thread, without a model: what clients see when something goes wrong."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import wait_until
from helpers_engine import TIMEOUT, Gate, expected_text, held
from helpers_http import Caller, serving
from helpers_served import FakeBuild

from mlxserve.core.step import ScheduledStep

LONG_PROMPT = "the dog ate the log and " * 4


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def events_of(stream: bytes | str) -> list[dict[str, Any] | str]:
    text = stream if isinstance(stream, str) else stream.decode()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


# --- clients that go away or stop reading ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_a_disconnect_frees_the_blocks_with_the_next_step(
    state: str, stream: bool, build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor
) -> None:
    with serving(build, tmp_path, max_num_seqs=1, max_prefill_tokens=8) as server, held(Gate()) as gate:
        server.runner.before_step = gate
        if state == "waiting":
            first = background.submit(server.complete, max_tokens=3)
            gate.wait()
        with Caller(server, prompt=LONG_PROMPT, max_tokens=100, stream=stream):
            if state == "waiting":
                wait_until(lambda: server.host.num_in_flight == 2)
            else:
                for _ in range({"prefill": 2, "decode": 9}[state]):
                    gate.wait()
                    gate.let_go()
                gate.wait()
            num_steps, num_others = len(server.runner.steps), int(state == "waiting")
            assert server.metric("kv_cache_blocks_used") > 0
        wait_until(lambda: server.host.num_in_flight == num_others)
        gate.open()
        wait_until(lambda: server.metric("kv_cache_blocks_used") == 0)
        assert server.metric("num_requests_waiting") == 0
        if state == "waiting":
            assert first.result(TIMEOUT).json()["choices"][0]["text"] == expected_text("the cat", 3)
        else:
            # The one that was in flight, and the one that tells the runner.
            wait_until(lambda: server.runner.steps[-1].released)
            assert len(server.runner.steps) == num_steps + 1
        assert server.complete(max_tokens=5).json()["choices"][0]["text"] == expected_text("the cat", 5)


def test_a_reader_that_stops_holds_up_nobody_and_loses_nothing(build: FakeBuild, tmp_path: Path) -> None:
    prompts = [f"the dog {i}" for i in range(16)]
    with serving(build, tmp_path, max_num_seqs=32) as server:
        # At the pace of a model, so that a delta is a token; then what is written exceeds every buffer.
        server.runner.before_step = lambda step: time.sleep(0.002)
        with Caller(server, prompt=prompts, max_tokens=150, stream=True) as caller:
            wait_until(lambda: server.host.num_in_flight == 16)
            for i in range(5):
                assert server.complete(max_tokens=5 + i).json()["choices"][0]["text"] == expected_text("the cat", 5 + i)
            wait_until(lambda: server.metric("num_requests_running") == 0)
            assert server.metric("kv_cache_blocks_used") == 0
            assert server.host.num_in_flight > 0
            # asyncio's high-water mark and one write beyond it, where 2,400 chunks would be some 500 kB.
            assert 0 < server.num_unsent_bytes() < 70_000
            events = events_of(caller.read_to_end())
        assert events[-1] == "[DONE]"
        for index, prompt in enumerate(prompts):
            assert text_of(events, index) == expected_text(prompt, 150)
        wait_until(lambda: server.host.num_in_flight == 0)


def test_a_reader_that_stops_and_goes_away_leaves_nothing(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, max_num_seqs=32) as server:
        server.runner.before_step = lambda step: time.sleep(0.002)
        with Caller(server, prompt=[f"the dog {i}" for i in range(16)], max_tokens=150, stream=True):
            wait_until(lambda: server.metric("num_requests_running") == 16)
            wait_until(lambda: server.metric("num_requests_running") == 0)
            assert server.host.num_in_flight > 0
        wait_until(lambda: server.host.num_in_flight == 0)


# --- too much ---


def test_a_full_queue_is_429_with_retry_after(build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor) -> None:
    with serving(build, tmp_path, max_num_seqs=1, max_queue=1) as server:
        with held(Gate()) as gate:
            server.runner.before_step = gate
            accepted = [background.submit(server.complete, max_tokens=4, stream=stream) for stream in (False, True)]
            wait_until(lambda: server.host.num_in_flight == 2)
            for stream in (False, True):
                refused = server.complete(stream=stream)
                assert error_of(refused) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
        whole, stream_reply = (future.result(TIMEOUT) for future in accepted)
        assert whole.json()["choices"][0]["text"] == expected_text("the cat", 4)
        events = events_of(stream_reply.text)
        assert (text_of(events), events[-1]) == (expected_text("the cat", 4), "[DONE]")


def test_a_burst_is_answered_as_far_as_the_queue_goes(
    build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor
) -> None:
    """Nobody is accepted with a 200 and then refused."""
    with serving(build, tmp_path, max_num_seqs=2, max_queue=3) as server:
        with held(Gate()) as gate:
            server.runner.before_step = gate
            burst = [background.submit(server.complete, max_tokens=4, stream=True) for _ in range(12)]
            wait_until(lambda: sum(future.done() for future in burst) == 7)
        replies = [future.result(TIMEOUT) for future in burst]
        assert sorted(reply.status_code for reply in replies) == [200] * 5 + [429] * 7
        for reply in replies:
            if reply.status_code == 200:
                assert text_of(events_of(reply.text)) == expected_text("the cat", 4)


def test_a_deadline_is_504(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path) as server:
        assert error_of(server.complete(timeout=1e-9)) == (504, "timeout")
        events = events_of(server.complete(timeout=1e-9, stream=True).text)
        assert events[-1]["error"]["code"] == "timeout"
        assert server.complete(timeout=TIMEOUT).status_code == 200


# --- an engine that fails ---


def test_a_failed_step_is_an_error_for_its_requests_only(
    build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor
) -> None:
    def fail_once(step: ScheduledStep) -> None:
        gate()
        if len(server.runner.steps) == 5:
            raise RuntimeError("out of memory")

    gate = Gate()
    with serving(build, tmp_path, max_num_seqs=2) as server:
        with held(gate):
            server.runner.before_step = fail_once
            lost = [background.submit(server.complete, max_tokens=9, stream=True)]
            gate.wait()
            lost.append(background.submit(server.complete, max_tokens=9))
            wait_until(lambda: server.host.num_in_flight == 2)
            kept = [
                background.submit(server.complete, "the dog", max_tokens=9, stream=stream) for stream in (False, True)
            ]
            wait_until(lambda: server.host.num_in_flight == 4)
        events = events_of(lost[0].result(TIMEOUT).text)
        assert events[-1]["error"]["code"] == "engine_error"
        assert text_of(events) == expected_text("the cat", 4)
        assert error_of(lost[1].result(TIMEOUT)) == (500, "engine_error")
        assert kept[0].result(TIMEOUT).json()["choices"][0]["text"] == expected_text("the dog", 9)
        assert text_of(events_of(kept[1].result(TIMEOUT).text)) == expected_text("the dog", 9)
        assert server.health().status_code == 200
        wait_until(lambda: server.metric("kv_cache_blocks_used") == 0)


def test_an_engine_that_keeps_failing_is_loaded_again_by_the_next_request(build: FakeBuild, tmp_path: Path) -> None:
    def fail(step: ScheduledStep) -> None:
        raise RuntimeError("out of memory")

    with serving(build, tmp_path) as server:
        server.runner.before_step = fail
        for _ in range(3):
            assert server.health().status_code == 200
            assert error_of(server.complete())[0] == 500
        health = server.health()
        assert (health.status_code, health.json()["status"]) == (503, "error")
        assert "out of memory" in health.json()["detail"]
        assert server.complete(max_tokens=5).json()["choices"][0]["text"] == expected_text("the cat", 5)
        assert server.health().status_code == 200
        assert build.loads == ["one", "one"]


def test_a_killed_engine_thread_answers_everyone_and_turns_health_red(
    build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor
) -> None:
    gate = Gate()

    def die(step: ScheduledStep) -> None:
        gate()
        if len(server.runner.steps) == 4:
            raise SystemExit("killed")

    with serving(build, tmp_path, max_num_seqs=2) as server:
        assert server.health().status_code == 200
        with held(gate):
            server.runner.before_step = die
            # Two that run and two that wait, of each kind one.
            calls = []
            for i in range(4):
                calls.append(background.submit(server.complete, max_tokens=9, stream=i % 2 == 0))
                wait_until(lambda i=i: server.host.num_in_flight == i + 1)
        for i, call in enumerate(calls):
            reply = call.result(TIMEOUT)
            if i % 2:
                assert error_of(reply) == (503, "engine_dead")
            else:
                assert events_of(reply.text)[-1]["error"]["code"] == "engine_dead"
        health = server.health()
        assert health.status_code == 503
        assert "killed" in health.json()["detail"]
        assert error_of(server.complete()) == (503, "engine_dead")
        assert server.host.num_in_flight == 0


def test_a_load_that_fails_is_told_to_everyone_and_tried_again(
    build: FakeBuild, tmp_path: Path, background: ThreadPoolExecutor
) -> None:
    def fail(step: ScheduledStep) -> None:
        raise RuntimeError("out of memory")

    with serving(build, tmp_path) as server:
        server.runner.before_step = fail
        for _ in range(3):
            server.complete()
        with held(Gate()) as gate:
            build.before_load = gate
            build.load_error = RuntimeError("the disk is gone")
            calls = [background.submit(server.complete) for _ in range(3)]
            gate.wait()
        assert [error_of(call.result(TIMEOUT))[0] for call in calls] == [500] * 3
        build.load_error = None
        assert server.complete().status_code == 200
