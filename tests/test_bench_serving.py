"""The load generator of scripts/bench_serving: what it reports against what a stand-in server is known to have done."""

import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import standin_server
import tiny_models
from helpers_bench import approximately, in_virtual_time
from mlx_lm import utils
from standin_server import Plan, StandinServer
from tokenizers import Tokenizer, models

from mlxserve.bench import client, summary, workloads
from mlxserve.bench.client import Answer, Target
from mlxserve.bench.figures import METRICS, percentile, request_figures
from mlxserve.bench.process import Server, ServerSpec, free_port
from mlxserve.bench.prompts import PromptMaker
from mlxserve.bench.results import Results, ratios, spread
from mlxserve.bench.workloads import Cell, Measurement
from mlxserve.errors import TargetError
from mlxserve.store import loader

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from serving_bench import report  # noqa: E402
from serving_bench.export_model import export  # noqa: E402


async def ask(server: StandinServer, prompt: str = "hello", max_tokens: int = 64) -> Answer:
    async with server.running():
        return await client.complete(Target(server.port, "tiny", {"ignore_eos": True}), prompt, max_tokens)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_times_of_one_stream(is_chunked: bool) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    delays = standin_server.random_delays(random.Random(seed), 64)
    server = StandinServer(lambda body: Plan.of_tokens(delays, is_chunked=is_chunked))
    answer = in_virtual_time(ask(server))
    assert answer.ttft == approximately(delays[0])
    assert answer.gaps == [approximately(delay) for delay in delays[1:]]
    assert answer.tpot == approximately(statistics.mean(delays[1:]))
    assert (answer.num_tokens, answer.num_prompt_tokens) == (64, 7)
    assert answer.text.split() == [f"word{index}" for index in range(64)]
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": "hello",
            "max_tokens": 64,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_percentiles_over_concurrent_streams(prompts: PromptMaker) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    source = random.Random(seed)
    planned: list[list[float]] = []

    def choose(body: dict[str, Any]) -> Plan:
        planned.append(standin_server.random_delays(source, 40))
        return Plan.of_tokens(planned[-1], prompt_tokens=20)

    async def load(server: StandinServer) -> Measurement:
        async with server.running():
            cell = Cell("concurrency", 8, 20, 64, requests_per_stream=2)
            return await workloads.measure(cell, Target(server.port, "tiny"), prompts, server="standin", run=3)

    server = StandinServer(choose)
    measurement = in_virtual_time(load(server))
    gaps = [gap for delays in planned for gap in delays[1:]]
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    figures = measurement.figures
    assert [figures[name] for name in ("itl_p50", "itl_p95", "itl_p99")] == [
        approximately(cuts[percent - 1]) for percent in (50, 95, 99)
    ]
    assert figures["ttft_p50"] == approximately(statistics.median(delays[0] for delays in planned))
    assert figures["tpot_p50"] == approximately(statistics.median(statistics.mean(delays[1:]) for delays in planned))
    # Requests arrive in pairs of one stream, the second ones in the order in which the first ones ended.
    ends = sorted(sum(delays) for delays in planned[:8])
    total = max(end + sum(delays) for end, delays in zip(ends, planned[8:], strict=True))
    assert figures["tokens_per_second"] == approximately(16 * 40 / total)
    assert (figures["early_stops"], figures["tokens_per_chunk"]) == (16, 1.0)
    assert (measurement.server, measurement.run, len(measurement.answers)) == ("standin", 3, 16)
    assert len({body["prompt"] for body in server.bodies}) == 16


def test_chunks_that_come_together_and_tokens_that_share_a_chunk() -> None:
    word = standin_server.chunk
    steps = [(1.0, word("a")), (0.1, word("b") + word("c")), (0.3, word("d e f"))]
    server = StandinServer(lambda body: Plan([*steps, (0.0, standin_server.end(7, 6))]))
    answer = in_virtual_time(ask(server))
    assert answer.gaps == [approximately(gap) for gap in (0.1, 0.0, 0.3)]
    assert answer.tpot == approximately(0.4 / 5)
    assert request_figures([answer], 6)["tokens_per_chunk"] == 1.5


@pytest.mark.parametrize("names", [("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")])
def test_thoughts_are_text(prompts: PromptMaker, names: tuple[str, ...]) -> None:
    first, second, third, fourth = [f" {word}" for word in prompts.text(5).split()][:4]
    steps = [(1.0, standin_server.thought(first, *names)), (0.2, standin_server.thought(second, *names, content=third))]
    steps.append((0.3, standin_server.chunk(fourth)))
    tellings = [{"completion_tokens": 4, "reasoning_tokens": 2}, {"completion_tokens": 4}, {"completion_tokens": 0}]
    endings = iter([standin_server.end(7, **telling) for telling in tellings])
    server = StandinServer(lambda body: Plan([*steps, (0.0, next(endings))]))

    async def measure() -> Measurement:
        async with server.running():
            cell = Cell("output-length", 1, 60, 4, requests_per_stream=len(tellings), stops_at_eos=True)
            return await workloads.measure(cell, Target(server.port, "tiny"), prompts, server="standin", run=0)

    measurement = in_virtual_time(measure())
    for answer in measurement.answers:
        assert answer.ttft == approximately(1.0)
        assert answer.gaps == [approximately(gap) for gap in (0.2, 0.3)]
        assert answer.text == first + second + third + fourth
        assert answer.num_tokens == 4, "of the server, or where it tells none, of the tokenizer"
    assert [answer.num_reasoning_tokens for answer in measurement.answers] == [2, 0, 0]
    results = Results(None)
    results.add(measurement)
    assert "2 of 12 output tokens were reasoning" in next(summary.notes(results))


def test_an_event_cut_across_reads_counts_when_it_is_whole() -> None:
    event = standin_server.chunk("whole")
    steps = [(0.5, event[:20]), (0.5, event[20:]), (0.0, standin_server.end(7, 1))]
    assert in_virtual_time(ask(StandinServer(lambda body: Plan(steps)))).ttft == approximately(1.0)


def test_a_long_prompt_beside_running_streams(prompts: PromptMaker) -> None:
    gap = 0.25  # until all streams run, then 0.1, beside the long prompt 0.35, beside its answer 0.9

    def running_stream(ttft: float) -> Iterator[tuple[float, bytes]]:
        nonlocal gap
        yield ttft, standin_server.chunk("first")
        if ttft == 20.0:
            gap = 0.1
        while True:
            yield gap, standin_server.chunk("next")

    def long_stream() -> Iterator[tuple[float, bytes]]:
        nonlocal gap
        gap = 0.35
        yield 3.05, standin_server.chunk("first")
        gap = 0.9
        yield 60.0, standin_server.chunk("second") + standin_server.end(300, 2)

    def choose(body: dict[str, Any]) -> Plan:
        if body["max_tokens"] == workloads.MAX_STREAM_TOKENS:
            return Plan(running_stream(20.0 if len(server.bodies) == 4 else 0.2))
        return Plan(long_stream())

    async def load(server: StandinServer) -> Measurement:
        async with server.running():
            cell = Cell("mixed", 4, 300, 3)
            measurement = await workloads.measure(cell, Target(server.port, "tiny"), prompts, server="standin", run=0)
            await asyncio.sleep(1.0)
            return measurement

    server = StandinServer(choose)
    figures = in_virtual_time(load(server)).figures
    assert figures["ttft_long"] == approximately(3.05)
    assert figures["itl_quiet"] == approximately(0.1)
    assert [figures["itl_p50"], figures["itl_p99"], figures["itl_max"]] == [approximately(0.35)] * 3
    assert [figures["p99_to_quiet"], figures["max_to_quiet"]] == [approximately(3.5)] * 2
    assert server.num_cut_off == 4
    assert len(server.bodies) == 5


def test_running_streams_that_end_before_the_long_prompt_comes(prompts: PromptMaker) -> None:
    async def load(server: StandinServer) -> None:
        async with server.running():
            cell = Cell("mixed", 2, 300, 3)
            await workloads.measure(cell, Target(server.port, "tiny"), prompts, server="standin", run=0)

    with pytest.raises(TargetError, match="a stream ended before all 2 had sent 24 chunks"):
        in_virtual_time(load(StandinServer(lambda body: Plan.of_tokens([0.1] * 5))))


def test_second_turn_of_a_chat(prompts: PromptMaker) -> None:
    def choose(body: dict[str, Any]) -> Plan:
        ttft, cached = (2.0, 0) if len(body["messages"]) == 1 else (0.125, 190)
        return Plan([(ttft, standin_server.chunk("An answer.")), (0.1, standin_server.end(200, 1, cached))])

    async def load(server: StandinServer) -> Measurement:
        async with server.running():
            cell = Cell("multi-turn", 1, 200, 1)
            return await workloads.measure(cell, Target(server.port, "tiny"), prompts, server="standin", run=0)

    server = StandinServer(choose)
    figures = in_virtual_time(load(server)).figures
    assert figures["ttft_first"] == approximately(2.0)
    assert figures["ttft_second"] == approximately(0.125)
    assert figures["first_to_second"] == approximately(16.0)
    assert figures["cached_tokens"] == 190
    first, second = (body["messages"] for body in server.bodies)
    assert second[:2] == [*first, {"role": "assistant", "content": "An answer."}]
    assert second[2]["role"] == "user"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan([(0.0, b'{"error": "no room"}')], status=503), "answered 503.*no room"),
        (Plan([(0.1, standin_server.chunk("a"))]), "broken after 1 events.*ended before the stream did"),
        (Plan([(0.1, standin_server.chunk("a"))], is_chunked=False), "broken after 1 events"),
        (Plan([(0.1, standin_server.error("out of memory")), (0.0, b"data: [DONE]\n\n")]), "out of memory"),
        (Plan([(0.1, standin_server.end(7, 1))]), "without any text"),
        (Plan([(0.1, standin_server.chunk("a")), (1e6, b"")]), "broken after 1 events: TimeoutError"),
    ],
    ids=["status", "cut off", "cut off without chunks", "error event", "no text", "hangs"],
)
def test_a_request_that_fails_is_no_figure(plan: Plan, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        in_virtual_time(ask(StandinServer(lambda body: plan)))


def test_nobody_listens() -> None:
    with pytest.raises(TargetError, match="Connect"):
        asyncio.run(client.complete(Target(free_port(), "tiny"), "hello", 1))


@pytest.mark.slow
def test_times_on_the_real_clock() -> None:
    # Medians: a single gap may be stretched by whatever else the machine does at that moment.
    server = StandinServer(lambda body: Plan.of_tokens([0.2] + [0.02] * 100))
    answer = asyncio.run(ask(server))
    (stamps,) = server.stamps
    written = stamps[1:-1]
    assert statistics.median(
        abs(arrived - sent) for arrived, sent in zip(answer.chunk_times, written, strict=True)
    ) == pytest.approx(0.0, abs=0.002)
    assert statistics.median(answer.gaps) == approximately(
        statistics.median(after - before for before, after in pairwise(written))
    )


def test_prompts_have_exactly_the_wanted_length(tokenizer_file: Path, prompts: PromptMaker) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lengths = [*range(1, 4)] * 300 + [64, 1024]  # A short text is the one that a first word of two tokens would spoil.
    assert [len(tokenizer.encode(prompts.text(length)).ids) for length in lengths] == lengths
    prompts.seed("0 warm-up")
    again = prompts.text(64)
    prompts.seed("0 warm-up")
    assert prompts.text(64) == again
    assert prompts.text(64) != again
    with pytest.raises(ValueError, match="no text of 0 tokens"):
        prompts.text(0)


def test_a_vocabulary_without_words() -> None:
    with pytest.raises(ValueError, match="only 0 words"):
        PromptMaker(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])))


def measurement(server: str, run: int, cell: Cell, **figures: float) -> Measurement:
    every = {metric.key: 1.0 for metric in METRICS[cell.workload]}
    lengths = {"prompt_tokens_min": cell.num_prompt_tokens, "prompt_tokens_max": cell.num_prompt_tokens}
    answer = Answer(0.0, (1.0, 2.0), "private", cell.num_prompt_tokens, 0, 2)
    return Measurement(cell, server, run, every | lengths | figures, (answer,), 0.01)


def test_ratios_are_taken_within_each_run(tmp_path: Path) -> None:
    cell = Cell("concurrency", 4, 128, 64)
    results = Results(tmp_path)
    # The machine is twice as fast in the third run; the one of the fourth run has no counterpart.
    for run, (ours, theirs) in enumerate([(30.0, 20.0), (32.0, 20.0), (60.0, 42.0)]):
        results.add(measurement("mlxserve", run, cell, tokens_per_second=ours, tokens_per_chunk=1.0))
        results.add(measurement("other", run, cell, tokens_per_second=theirs, early_stops=1, prompt_tokens_max=129))
    results.add(measurement("mlxserve", 3, cell, tokens_per_second=1.0))
    metric = METRICS["concurrency"][0]
    found = ratios(results.of(cell, "mlxserve"), results.of(cell, "other"), metric)
    assert found == [pytest.approx(ratio) for ratio in (1.5, 1.6, 60 / 42)]
    text = report.tables(results, [cell], {cell: ["mlxserve", "other"]})
    assert "| 128 | 4 | mlxserve | 4 | 31.0 (1.00-60.0) |" in text
    assert "| 128 | 4 | other | 3 | 20.0 (20.0-42.0) |" in text
    assert "| 128 | 4 | other | 1.50 (1.43-1.60) |" in text
    assert "- other: **3 of 3 answers ended before the wanted length" in text
    assert "- The client used 1.0% of one core on average, 1.0% at most" in text
    lines = (tmp_path / "measurements.csv").read_text().splitlines()
    assert lines[0] == "workload,prompt_tokens,output_tokens,streams,rate,server,run,figure,value"
    assert "concurrency,128,64,4,,other,2,tokens_per_second,42" in lines
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 7
    assert (requests[1]["server"], requests[1]["chunk_times"], requests[1]["run"]) == ("other", [1.0, 2.0], 0)
    assert "private" not in (tmp_path / "requests.jsonl").read_text()


def test_the_better_variant_counts() -> None:
    fast, patient = Cell("concurrency", 1, 128, 64), Cell("multi-turn", 1, 2000, 64)
    results = Results(None)
    for cell, key, values in (
        (fast, "tokens_per_second", (9.0, 12.0, 11.0)),
        (patient, "ttft_first", (9.0, 12.0, 11.0)),
    ):
        for name, value in zip("abc", values, strict=True):
            results.add(measurement(name, 0, cell, **{key: value}))
    assert report.better(results, fast, ["a", "b", "c"]) == "b"
    assert report.better(results, patient, ["c", "b", "a"]) == "a"
    text = report.tables(results, [fast], {fast: ["a", "b"]})
    assert "- c: not counted in 1 of the loads, where" in text
    assert "| 128 | 1 | c |" not in text


def test_figures_show_three_digits() -> None:
    assert spread([9.994, 0.0012, 99.949, 123.4, 9.996]) == "10.0 (0.00-123)"
    assert spread([1234.5]) == "1234"
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([], 50) == 0.0


HEALTHY_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b'{"data": [{"id": "other"}, {"id": "tiny", "loaded": true}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'data: {"choices": [{"text": "a"}]}\\n\\ndata: [DONE]\\n\\n')
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_runs_only_when_it_is_its_turn(tmp_path: Path) -> None:
    spec = ServerSpec("healthy", "healthy", ("{python}", "-c", HEALTHY_SERVER, "{port}"), None, {"x": 1})
    server = Server(spec, tmp_path / "log")

    async def use() -> None:
        await server.wait_until_healthy()
        assert (server.target.model, server.target.fields) == ("tiny", {"x": 1})
        for _ in range(2):
            async with server.awake() as target:
                assert (await client.complete(target, "hello", 1)).text == "a"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.request(target, "GET", "/health")

    server.start()
    try:
        asyncio.run(use())
    finally:
        server.stop()
    with pytest.raises(OSError, match="Connect"):
        asyncio.run(client.request(server.target, "GET", "/health"))
    server.stop()


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    spec = ServerSpec("broken", "broken", (sys.executable, "-c", "raise SystemExit('no weights here')"), "tiny")
    server = Server(spec, tmp_path / "log")
    server.start()
    with pytest.raises(TargetError, match=r"(?s)broken does not run:.*no weights here"):
        asyncio.run(server.wait_until_healthy())
    server.stop()


@pytest.mark.parametrize(("bits", "policy"), [(None, "keep"), (4, "keep"), (4, "float32")])
def test_exported_models_are_the_same_for_mlx_lm(tmp_path: Path, bits: int | None, policy: Any) -> None:
    source = tiny_models.save(tmp_path / "source", "llama", bits=bits)
    loaded = loader.load(source, name="tiny", dtype_policy=policy)
    export(loaded, tmp_path / "exported")
    model, tokenizer = utils.load(str(tmp_path / "exported"))
    ids = mx.array([tiny_models.prompt(20)])
    assert mx.array_equal(model(ids), loaded.model(ids))
    assert ("scales" in model.layers[0].mlp.up_proj) is (bits is not None and policy == "keep")
    text = "the cat sat on the mat"
    assert tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert (tmp_path / "exported" / "tokenizer.json").exists()


def test_help_and_wrong_arguments() -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / "bench_serving.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "--mlx-lm-steps" in run("--help").stdout
    assert "invalid choice: 'chat'" in run("--workloads", "chat").stderr
    assert "'0' is not a number from 1 on" in run("--runs", "0").stderr
    assert "'/no/such' is not a program" in run("--llama-server", "/no/such").stderr
