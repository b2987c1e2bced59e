"""/debug over the real host without a model: shapes, bounds, errors, and who may see what."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_engine import wait_until
from helpers_engine import Gate, held, tokenizer
from helpers_http import Server, serving
from helpers_served import FakeBuild

from mlxserve.config import ServerConfig
from mlxserve.engine import journal

REQUEST_KEYS = {
    "id", "model", "state", "received", "stages", "total", "ttft", "num_prompt_tokens", "num_cached_tokens",
    "num_computed_tokens", "num_generated_tokens", "num_preemptions", "priority", "outcome",
}  # fmt: skip
STEP_KEYS = {
    "step_id", "time", "num_rows", "num_chunks", "num_prefill_tokens", "num_draft_tokens", "budget", "predicted",
    "measured", "requests", "num_running", "num_waiting", "num_blocks_used", "num_blocks_cached",
}  # fmt: skip
LONG_PROMPT = "the dog ate the log and " * 4


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


def done(server: Server, **fields: Any) -> dict[str, Any]:
    """Send a request and return what /debug says of it when it is over."""
    request_id = server.complete(**fields).json()["id"]
    wait_until(lambda: server.get(f"/debug/requests/{request_id}").json()["state"] == "done")
    return server.get(f"/debug/requests/{request_id}").json()


def kinds(trace: dict[str, Any]) -> list[str]:
    return [event["kind"] for event in trace["events"]]


def test_a_request_from_its_first_stamp_to_its_last(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, max_prefill_tokens=16) as server:
        trace = done(server, prompt=LONG_PROMPT, max_tokens=3)
        assert set(trace) > REQUEST_KEYS
        assert "prompt" not in trace
        assert kinds(trace)[:5] == ["received", "parsed", "loaded", "tokenised", "queued"]
        counts = Counter(kinds(trace))
        assert counts["chunk"] > 1
        assert (counts["scheduled"], counts["first_token"], counts["token"], counts["last_token"]) == (1, 1, 2, 1)
        assert kinds(trace)[-1] == "delivered"
        times = [event["time"] for event in trace["events"]]
        assert times == sorted(times)
        assert trace["received"] == times[0]
        assert (trace["outcome"], trace["num_generated_tokens"], trace["num_cached_tokens"]) == ("length", 3, 0)
        steps = {step["step_id"]: step for step in server.get("/debug/steps").json()["models"][0]["steps"]}
        for event in trace["events"]:
            if event["kind"] in ("chunk", "token", "first_token"):
                assert trace["id"] in steps[event["step_id"]]["requests"]
        again = done(server, prompt=LONG_PROMPT, max_tokens=3)
        (hit,) = [event for event in again["events"] if event["kind"] == "cache_hit"]
        assert hit["num_tokens"] == again["num_cached_tokens"] == again["num_prompt_tokens"] - 1


def test_a_chat_is_templated(build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer().hf_tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with serving(build, tmp_path) as server:
        body = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        reply = server.client.post("/v1/chat/completions", json=body)
        trace = server.get(f"/debug/requests/{reply.json()['id']}").json()
        assert kinds(trace).index("templated") < kinds(trace).index("tokenised")


def test_live_ones_first_and_what_they_wait_for(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, max_num_seqs=1) as server, held(Gate()) as gate:
        ended = done(server, max_tokens=1)
        server.runner.before_step = gate
        with ThreadPoolExecutor(2) as executor:
            futures = [executor.submit(server.complete, max_tokens=5)]
            gate.wait()
            assert server.traces()[0]["state"] == "prefill"
            futures.append(executor.submit(server.complete, "another", max_tokens=2, priority=3))
            wait_until(lambda: len(server.traces()) == 3 and server.traces()[1]["state"] == "queued")
            # Only between two steps does the engine look at what came in.
            gate.let_go()
            gate.wait()
            wait_until(lambda: server.traces()[0]["state"] == "decode")
            _, queued, last = server.traces()
            assert (queued["state"], last["state"]) == ("queued", "done")
            assert last["id"] == ended["id"]
            assert (queued["priority"], queued["ttft"], queued["outcome"]) == (3, None, None)
            model = server.get("/debug/steps").json()["models"][0]
            assert (model["num_running"], model["num_waiting"]) == (1, 1)
            gate.open()
            assert [future.result().status_code for future in futures] == [200, 200]


def test_a_refused_request_is_remembered_with_its_reason(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path) as server:
        assert server.complete("a" * 300).status_code == 400
        (trace,) = server.traces()
        assert (trace["state"], trace["outcome"]) == ("done", "ContextLengthExceeded")
        assert trace["stages"]["front_end"] == pytest.approx(trace["total"])


def test_steps(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, max_prefill_tokens=16) as server:
        trace = done(server, prompt=LONG_PROMPT, max_tokens=5)
        reply = server.get("/debug/steps").json()
        (model,) = reply["models"]
        assert model["model"] == "one"
        assert set(model["blocks"]) == {"used", "shared", "cached", "max"}
        steps = model["steps"]
        assert all(set(step) == STEP_KEYS for step in steps)
        ids = [step["step_id"] for step in steps]
        assert ids == sorted(ids)
        assert sum(step["num_prefill_tokens"] for step in steps) == trace["num_prompt_tokens"] - 1
        for step in steps:
            # A chunk ends in a budget; a step without one has none.
            assert (step["budget"] is None) == (step["num_chunks"] == 0)
            if step["num_chunks"]:
                assert step["num_prefill_tokens"] <= step["budget"] <= 16
            assert step["time"] <= reply["now"]
        # The fake runner takes what it says: 1 ms a prompt token and 1 ms a row.
        assert steps[0]["measured"] == pytest.approx(0.001 * steps[0]["num_prefill_tokens"] + 0.001)
        assert steps[0]["predicted"] == 0.0
        assert steps[-2]["predicted"] == pytest.approx(0.001, rel=0.01)

        def listed(query: str) -> list[int]:
            return [step["step_id"] for step in server.get(f"/debug/steps?{query}").json()["models"][0]["steps"]]

        assert listed("limit=2") == ids[-2:]
        assert listed(f"after={ids[2]}") == ids[3:]
        assert listed(f"after={ids[2]}&limit=1") == ids[-1:]
        assert listed(f"after={ids[-1]}") == []


def test_a_trace_for_perfetto(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, max_prefill_tokens=16) as server:
        trace = done(server, prompt=LONG_PROMPT, max_tokens=3)
        reply = server.get("/debug/trace")
        assert "attachment" in reply.headers["content-disposition"]
        events = reply.json()["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert sorted(names.values()) == sorted(["steps", trace["id"]])
        slices = [e for e in events if e["ph"] == "X" and names[e["pid"], e["tid"]] == trace["id"]]
        assert sum(e["dur"] for e in slices) == pytest.approx(trace["total"] * 1e6)
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
        steps = [e for e in events if e["ph"] == "X" and names[e["pid"], e["tid"]] == "steps"]
        assert {e["name"] for e in steps} <= {"decode", "prefill", "mixed", "empty"}


@pytest.mark.parametrize(
    ("path", "param", "code"),
    [
        ("/debug/requests?limit=-1", "limit", "invalid_value"),
        ("/debug/requests?limit=0", "limit", "invalid_value"),
        ("/debug/requests?limit=many", "limit", "invalid_value"),
        ("/debug/requests?limit=", "limit", "invalid_value"),
        ("/debug/requests?limit=99999999999999999999", "limit", "invalid_value"),
        ("/debug/requests?limit=1&limit=2", "limit", "invalid_value"),
        ("/debug/requests?limit=%C2%B2", "limit", "invalid_value"),
        ("/debug/requests?offset=3", "offset", "unknown_parameter"),
        ("/debug/steps?after=-1", "after", "invalid_value"),
        ("/debug/steps?limit=1.5", "limit", "invalid_value"),
        ("/debug/trace?after=1", "after", "unknown_parameter"),
        ("/debug/requests/any?limit=1", "limit", "unknown_parameter"),
    ],
)
def test_wrong_parameters(path: str, param: str, code: str, build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path) as server:
        reply = server.get(path)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert param in error["message"]


def test_unknown_ids_and_methods(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path) as server:
        for request_id in ("nobody", "no/body", "%00"):
            reply = server.get(f"/debug/requests/{request_id}")
            assert reply.status_code == 404
        assert server.get("/debug/requests/nobody").json()["error"]["code"] == "request_not_found"
        assert server.client.post("/debug/requests").status_code == 405


def test_nothing_is_there_before_anything_happened(build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, preload=False) as server:
        assert server.get("/debug/requests").json()["requests"] == []
        assert server.get("/debug/steps").json()["models"] == []
        assert server.get("/debug/trace").json()["traceEvents"] == []


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/requests/x", "/debug/steps", "/debug/trace"])
def test_the_rules_of_the_api_hold_here(path: str, build: FakeBuild, tmp_path: Path) -> None:
    with serving(build, tmp_path, server_config=ServerConfig(api_key="secret")) as server:
        assert server.get(path).status_code == 401
        assert server.get(path, authorization="Bearer wrong").status_code == 401
        assert server.get(path, authorization="Bearer secret").status_code in (200, 404)
        assert server.get(path, authorization="Bearer secret", host="evil.example").status_code == 403
        assert server.get(path, authorization="Bearer secret", origin="https://evil.example").status_code == 403


@pytest.mark.parametrize("debug_prompts", [False, True])
def test_prompts_are_shown_only_if_the_server_was_told_to(
    debug_prompts: bool, build: FakeBuild, tmp_path: Path
) -> None:
    secret = "the cat has a secret"
    with serving(build, tmp_path, server_config=ServerConfig(debug_prompts=debug_prompts)) as server:
        trace = done(server, prompt=secret, max_tokens=2)
        assert trace.get("prompt") == (secret if debug_prompts else None)
        texts = [server.get(path).text for path in ("/debug/requests", "/debug/steps", "/debug/trace", "/metrics")]
        assert any(secret in text for text in texts) is debug_prompts


def test_memory_is_bounded(build: FakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_EVENTS", 5)
    monkeypatch.setattr(journal, "MAX_RECENT", 20)
    with serving(build, tmp_path) as server:
        trace = done(server, max_tokens=12)
        assert Counter(kinds(trace))["token"] == 4
        assert trace["num_events_left_out"] == 7
        assert trace["num_generated_tokens"] == 12
        for _ in range(journal.MAX_RECENT + 5):
            server.complete(max_tokens=1)
        wait_until(lambda: len(list(server.host.journal._live)) == 0)
        assert len(server.get("/debug/requests?limit=1000").json()["requests"]) == journal.MAX_RECENT
        assert server.get(f"/debug/requests/{trace['id']}").status_code == 404
        assert all(trace.request is None for trace in server.host.journal), "what has ended keeps its tokens"
        assert len(server.get("/debug/requests?limit=3").json()["requests"]) == 3
