"""`mlxserve bench` against a stand-in server: arrivals, goodput, and every way a target can be wrong."""

import asyncio
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import standin_server
from helpers_bench import approximately, in_virtual_time
from standin_server import Plan, StandinServer

from mlxserve.bench import command, compare, plan, plot, report, target, workloads
from mlxserve.bench.client import Target
from mlxserve.bench.command import Options
from mlxserve.bench.figures import Limits
from mlxserve.bench.plan import Sizes
from mlxserve.bench.process import free_port
from mlxserve.bench.prompts import CommonWords, PromptMaker
from mlxserve.bench.target import KnownTarget
from mlxserve.bench.workloads import Cell, Measurement
from mlxserve.errors import BenchError, TargetError

TINY = {"id": "tiny", "context_length": 400, "loaded": True}


def tokens(body: dict[str, Any], **arguments: Any) -> Plan:
    """An answer of the wanted length: 0.5 s to its first token, 50 ms between two."""
    return Plan.of_tokens([0.5] + [0.05] * (body["max_tokens"] - 1), prompt_tokens=32, **arguments)


def load(server: StandinServer, cell: Cell, prompts: Any, **arguments: Any) -> Measurement:
    async def run() -> Measurement:
        async with server.running():
            where = Target(server.port, "tiny", {"ignore_eos": True})
            return await workloads.measure(cell, where, prompts, server="standin", run=0, **arguments)

    return in_virtual_time(run())


# --- loads


def test_arrivals_are_a_poisson_process_that_waits_for_nobody(prompts: PromptMaker) -> None:
    rate, count = 20.0, 400
    prompts.seed("arrivals")
    server = StandinServer(lambda body: Plan.of_tokens([30.0, 0.1]))
    measurement = load(server, Cell("concurrency", 1, 8, 2, count, rate=rate), prompts)
    sent = sorted(answer.sent for answer in measurement.answers)
    gaps = [after - before for before, after in pairwise(sent)]
    assert sent[-1] - sent[0] < 30.0, "all were sent before the first answer came"
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(1 / rate, rel=0.15), "exponential: as wide as its mean"
    within_mean = sum(gap < 1 / rate for gap in gaps) / len(gaps)
    assert within_mean == pytest.approx(1 - 1 / 2.71828, abs=0.05)
    assert measurement.figures["ttft_p99"] == approximately(30.0)
    assert measurement.figures["client_late_max"] < 0.01


def test_goodput_counts_what_keeps_both_limits(prompts: PromptMaker) -> None:
    # TTFT and TPOT of six requests; only the first two keep both limits.
    plans = iter([(0.1, 0.02), (0.2, 0.04), (0.6, 0.02), (0.1, 0.09), (0.9, 0.2), (0.501, 0.01)])

    def choose(body: dict[str, Any]) -> Plan:
        ttft, gap = next(plans)
        return Plan.of_tokens([ttft] + [gap] * 9)

    server = StandinServer(choose)
    figures = load(server, Cell("concurrency", 1, 8, 10, 6), prompts, limits=Limits(ttft=0.49, tpot=0.05)).figures
    seconds = 0.1 + 0.2 + 0.6 + 0.1 + 0.9 + 0.501 + 9 * (0.02 + 0.04 + 0.02 + 0.09 + 0.2 + 0.01)
    assert figures["goodput"] == approximately(2 / seconds)
    assert figures["goodput_share"] == approximately(2 / 6)
    assert "goodput" not in load(StandinServer(tokens), Cell("concurrency", 1, 8, 10), prompts).figures


def test_too_busy_is_counted_with_arrivals_and_an_error_without(prompts: PromptMaker) -> None:
    def server() -> StandinServer:
        made = StandinServer(lambda body: tokens(body) if len(made.bodies) % 2 else busy)
        return made

    busy = standin_server.page({"error": {"message": "queue full"}}, status=429)
    figures = load(server(), Cell("concurrency", 1, 8, 4, 10, rate=5.0), prompts, limits=Limits(ttft=9.0)).figures
    assert (figures["refused"], figures["goodput_share"]) == (5, 0.5)
    assert figures["ttft_p50"] == approximately(0.5)
    with pytest.raises(TargetError, match=r"answered 429.*queue full"):
        load(server(), Cell("concurrency", 2, 8, 4), prompts)
    with pytest.raises(TargetError, match="refused all 3 requests"):
        load(StandinServer(lambda body: busy), Cell("concurrency", 1, 8, 4, 3, rate=5.0), prompts)


def test_prompts_that_begin_alike(prompts: PromptMaker) -> None:
    def choose(body: dict[str, Any]) -> Plan:
        is_first = len(server.bodies) == 1
        ending = standin_server.end(100, 2, 0 if is_first else 80)
        return Plan([(2.0 if is_first else 0.5, standin_server.chunk("a")), (0.1, standin_server.chunk("b") + ending)])

    server = StandinServer(choose)
    figures = load(server, Cell("shared-prefix", 1, 100, 2, 4, num_shared_tokens=80), prompts).figures
    assert (figures["ttft_first"], figures["ttft_later"]) == (approximately(2.0), approximately(0.5))
    assert (figures["first_to_later"], figures["cached_share"]) == (approximately(4.0), 0.8)
    texts = [body["prompt"].split() for body in server.bodies]
    # The tokenizer adds one token of its own in front.
    assert {len(text) for text in texts} == {99}
    assert len({tuple(text[:79]) for text in texts}) == 1
    assert len({text[79] for text in texts}) > 1


def test_the_same_prompts_again(prompts: PromptMaker) -> None:
    server = StandinServer(lambda body: Plan.of_tokens([3.0 if len(server.bodies) <= 3 else 1.0, 0.1]))
    figures = load(server, Cell("revisit", 1, 20, 2, 3), prompts).figures
    assert (figures["ttft_first"], figures["ttft_later"]) == (approximately(3.0), approximately(1.0))
    sent = [body["prompt"] for body in server.bodies]
    assert sent[:3] == sent[3:]
    assert len(set(sent)) == 3


def test_answers_that_the_model_ends(prompts: PromptMaker) -> None:
    server = StandinServer(lambda body: Plan.of_tokens([0.2, 0.1, 0.1]))
    load(server, Cell("output-length", 1, 100, 50, stops_at_eos=True), prompts)
    assert server.bodies[0]["messages"][0]["content"].startswith(workloads.QUESTION)
    assert server.paths == ["/v1/chat/completions"]
    assert "ignore_eos" not in server.bodies[0]


def test_a_server_without_token_counts(prompts: PromptMaker) -> None:
    last = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    words = prompts.text(5).split()
    steps = [(0.5, standin_server.chunk(words[0])), *((0.1, standin_server.chunk(f" {word}")) for word in words[1:])]
    server = StandinServer(lambda body: Plan([*steps, (0.0, last)]))
    (answer,) = load(server, Cell("concurrency", 1, 8, 4), prompts).answers
    assert (answer.num_tokens, answer.tpot) == (len(words), approximately(0.1))
    with pytest.raises(TargetError, match=r"no `usage`.*--tokenizer"):
        load(server, Cell("concurrency", 1, 8, 4), CommonWords())


# --- getting to know a target


def get_to_know(server: StandinServer, model: str | None = None, base: str = "") -> KnownTarget:
    async def run() -> KnownTarget:
        async with server.running():
            return await target.get_to_know(target.parse_url(f"127.0.0.1:{server.port}{base}", None), model)

    return in_virtual_time(run())


def test_a_compatible_target() -> None:
    server = StandinServer(tokens, standin_server.models({"id": "other", "loaded": False}, TINY))
    known = get_to_know(server, base="/v1/")
    assert (known.target.model, known.target.fields, known.notes) == ("tiny", {"ignore_eos": True}, ())
    assert known.first_ttft == approximately(0.5)
    assert get_to_know(server, "unlisted").target.model == "unlisted"


def test_what_a_target_refuses_is_left_out_and_noted() -> None:
    def choose(body: dict[str, Any]) -> Plan:
        if "prompt" in body:
            return standin_server.page({"error": "no such path"}, status=404)
        if "ignore_eos" in body:
            return standin_server.page({"error": "unknown field ignore_eos"}, status=400)
        return tokens(body)

    known = get_to_know(StandinServer(choose, standin_server.models(TINY)))
    assert (known.target.fields, known.target.has_completions) == ({}, False)
    assert [note.split(":")[0] for note in known.notes] == [
        "It has no /v1/completions",
        "It refuses `ignore_eos`",
    ]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({}, "is no OpenAI-compatible server: GET /v1/models answers 404"),
        ({"/v1/models": Plan([(0.0, b"<html>")])}, "is no OpenAI-compatible server.*<html>"),
        ({"/v1/models": standin_server.page({"data": 7})}, "is no OpenAI-compatible server"),
        ({"/v1/models": standin_server.page({}, status=401)}, "set MLXSERVE_API_KEY"),
        ({"/v1/models": Plan([(1e6, b"{}")])}, "no server at.*does not answer"),
        (standin_server.models(), "has 0 models"),
        (standin_server.models({"id": "a"}, {"id": "b"}), "has 2 models; name one with --model: a, b"),
    ],
)
def test_a_target_that_cannot_be_measured(pages: dict[str, Plan], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        get_to_know(StandinServer(tokens, pages))


def test_a_target_that_answers_no_request() -> None:
    broken = standin_server.page({"error": "out of memory"}, status=500)
    with pytest.raises(TargetError, match=r"does not answer a small request for model 'tiny'.*out of memory"):
        get_to_know(StandinServer(lambda body: broken, standin_server.models(TINY)))
    whole = Plan([(0.0, b'{"choices": [{"text": "not streamed"}]}')])
    with pytest.raises(TargetError, match="does not answer a small request"):
        get_to_know(StandinServer(lambda body: whole, standin_server.models(TINY)))
    strange = Plan([(0.0, b"data: nonsense\n\ndata: [DONE]\n\n")])
    with pytest.raises(TargetError, match="an event that is none of a completion: nonsense"):
        get_to_know(StandinServer(lambda body: strange, standin_server.models(TINY)))


def test_nobody_there_and_no_http() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await target.get_to_know(target.parse_url(f"127.0.0.1:{port}", None), None)

    with pytest.raises(TargetError, match="does not speak HTTP"):
        asyncio.run(run())
    with pytest.raises(TargetError, match=r"no server at .*mlxserve serve"):
        asyncio.run(target.get_to_know(target.parse_url(f"127.0.0.1:{free_port()}", None), None))


@pytest.mark.parametrize("url", ["ftp://box", "http://", "http://box:port", "http://box/v1?x=1", "http://[::1"])
def test_no_address(url: str) -> None:
    with pytest.raises(BenchError, match="--url"):
        target.parse_url(url, None)


def test_addresses() -> None:
    found = target.parse_url("https://box.local/llm/v1", "secret")
    assert (found.host, found.port, found.base, found.is_tls) == ("box.local", 443, "/llm", True)
    assert found.url == "https://box.local:443/llm"
    assert "secret" not in repr(found)
    assert target.parse_url("http://[::1]:8080", None).url == "http://[::1]:8080"


# --- sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(prompts=(0,)), "--prompt must be from 8 to 1,000,000, not 0"),
        (Sizes(prompts=(128, -5)), "--prompt must be"),
        (Sizes(outputs=(0,)), "--output-tokens must be from 2"),
        (Sizes(outputs=(10**9,)), "--output-tokens must be"),
        (Sizes(streams=(0,)), "--streams must be from 1 to 1,000"),
        (Sizes(num_requests=0), "--requests must be"),
        (Sizes(rates=(0.0,)), "--rate must be"),
        (Sizes(rates=(float("nan"),)), "--rate must be"),
        (Sizes(prompts=(300,), outputs=(101,)), "take 401 tokens, and the model has a context of 400"),
    ],
)
def test_absurd_sizes(sizes: Sizes, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        sizes.check(max_context=400)


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("speed",), Sizes(), "no workload 'speed'; there are input-length, output-length"),
        (("mixed",), Sizes(rates=(1.0,)), "--rate is of the workload concurrency, not of mixed"),
        (("concurrency",), Sizes(rates=(1.0,), streams=(2,)), "give one of them"),
        (("output-length",), Sizes(prompts=(10, 20)), "takes one value, not 10, 20"),
    ],
)
def test_sizes_that_do_not_go_together(names: tuple[str, ...], sizes: Sizes, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        plan.cells(names, sizes)


def test_every_workload_has_cells() -> None:
    for sizes in (Sizes(), Sizes(is_quick=True)):
        cells = plan.cells(plan.WORKLOADS, sizes)
        assert tuple(dict.fromkeys(cell.workload for cell in cells)) == plan.WORKLOADS
    asked = Sizes(prompts=(100, 200), outputs=(5,), streams=(1, 3), num_requests=2)
    assert plan.cells(("concurrency",), asked) == [
        Cell("concurrency", streams, prompt, 5, 2) for prompt in (100, 200) for streams in (1, 3)
    ]
    rates = Sizes(prompts=(100,), outputs=(5,), rates=(0.5, 2.0), num_requests=7)
    assert plan.cells(("concurrency",), rates) == [Cell("concurrency", 1, 100, 5, 7, rate=rate) for rate in (0.5, 2.0)]


# --- the whole command


def options(port: int, tokenizer: Path | None, *, runs: int = 2, **sizes: Any) -> Options:
    sizes = {"prompts": (32,), "outputs": (16,), "streams": (1, 2), "num_requests": 2} | sizes
    return Options(
        url=f"http://127.0.0.1:{port}",
        local_url="http://127.0.0.1:1",
        api_key=None,
        model=None,
        workloads=("concurrency",),
        sizes=Sizes(**sizes),
        runs=runs,
        limits=Limits(ttft=1.0),
        tokenizer=str(tokenizer) if tokenizer else None,
        seed=3,
        threads=None,
    )


def bench(server: StandinServer, folder: Path, tokenizer: Path | None, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Run it, and return the report and the summary."""

    async def run() -> None:
        async with server.running():
            await command.run(options(server.port, tokenizer, **arguments), folder, lambda text: None)

    in_virtual_time(run())
    return (folder / "report.md").read_text(), json.loads((folder / "run.json").read_text())


def test_a_report_and_its_raw_data(tmp_path: Path, tokenizer_file: Path) -> None:
    server = StandinServer(tokens, standin_server.models(TINY))
    text, summary = bench(server, tmp_path / "a", tokenizer_file)
    assert "INCOMPLETE" not in text
    assert re.search(r"^\| 32 \| 16 \| 2 \| 4 \| 2 \| 2[45]\.\d", text, re.M), "32 tokens in 1.25 s"
    assert "0.50 / 0.50 / 0.50 | 50.0 / 50.0 / 50.0" in text
    assert "counted by the model's own tokenizer" in text
    assert "First request: 0.50" in text
    assert (summary["failure"], len(summary["measurements"])) == (None, 4)
    rows = (tmp_path / "a" / "requests.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * (2 + 4)
    assert rows[0].startswith("workload,prompt_tokens,output_tokens,streams,rate,server,run,sent,ttft,tpot,e2e")
    page = (tmp_path / "a" / "report.html").read_text()
    for picture in re.findall(r'<img src="([^"]+)"', page):
        assert (tmp_path / "a" / picture).read_text().startswith("<?xml")
        assert (tmp_path / "a" / picture).with_suffix(".png").stat().st_size > 1000
    assert len(re.findall("<img", page)) == len(re.findall(r"^!\[", text, re.M)) == 2
    with pytest.raises(BenchError, match="holds the figures of another time"):
        bench(server, tmp_path / "a", tokenizer_file)


def test_without_matplotlib_and_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "is_available", lambda: False)
    text, _ = bench(StandinServer(tokens, standin_server.models(TINY)), tmp_path / "a", None)
    assert "pip install 'mlxserve[bench]'" in text
    assert "![" not in text
    assert not list((tmp_path / "a").glob("*.svg"))
    assert "lengths are as the server counts them" in text
    assert "the server's own count, unchecked" in text


def test_a_target_that_ignores_ignore_eos_is_found_out(tmp_path: Path, tokenizer_file: Path) -> None:
    server = StandinServer(lambda body: Plan.of_tokens([0.5] * 5, prompt_tokens=32), standin_server.models(TINY))
    text, summary = bench(server, tmp_path / "a", tokenizer_file)
    assert "**12 of 12 answers ended before the wanted length: the server takes no `ignore_eos`" in text
    assert summary["measurements"][0]["figures"]["output_tokens_mean"] == 5
    longer = StandinServer(lambda body: Plan.of_tokens([0.1] * 40, prompt_tokens=40), standin_server.models(TINY))
    text, _ = bench(longer, tmp_path / "b", tokenizer_file)
    assert "**12 answers are longer than `max_tokens`" in text
    assert "it counts the prompts as 40-40 for 32" in text


def test_a_server_that_stops_on_the_way(tmp_path: Path, tokenizer_file: Path) -> None:
    cut_off = Plan([(0.5, standin_server.chunk("a"))])
    # The probe, the warm-up, the first cell of the first run, and one request more.
    server = StandinServer(
        lambda body: tokens(body) if len(server.bodies) <= 1 + 4 + 2 + 1 else cut_off, standin_server.models(TINY)
    )
    with pytest.raises(BenchError, match=r"run 1 of concurrency \(2 x 32 in, 16 out\).*broke.*The report in"):
        bench(server, tmp_path / "a", tokenizer_file)
    text = (tmp_path / "a" / "report.md").read_text()
    summary = json.loads((tmp_path / "a" / "run.json").read_text())
    assert text.startswith("# Benchmark\n\n**INCOMPLETE: run 1 of concurrency (2 x 32 in, 16 out) on tiny broke:")
    assert [one["cell"]["num_streams"] for one in summary["measurements"]] == [1]
    assert "| 32 | 16 | 2 |" not in text
    with pytest.raises(BenchError, match="is incomplete: run 1 of concurrency"):
        compare.compare(tmp_path / "a", tmp_path / "a")


def test_an_interrupted_session_says_so(tmp_path: Path, tokenizer_file: Path) -> None:
    def choose(body: dict[str, Any]) -> Plan:
        if len(server.bodies) > 10:
            interrupted.cancel()
        return tokens(body)

    server = StandinServer(choose, standin_server.models(TINY))

    async def run() -> None:
        nonlocal interrupted
        interrupted = asyncio.current_task()
        async with server.running():
            await command.run(options(server.port, tokenizer_file), tmp_path / "a", lambda text: None)

    interrupted: Any = None
    with pytest.raises(asyncio.CancelledError):
        in_virtual_time(run())
    assert "**INCOMPLETE: it was interrupted.**" in (tmp_path / "a" / "report.md").read_text()
    assert json.loads((tmp_path / "a" / "run.json").read_text())["failure"] == "it was interrupted."


def test_a_context_that_is_too_short(tmp_path: Path, tokenizer_file: Path) -> None:
    server = StandinServer(tokens, standin_server.models(TINY))
    with pytest.raises(BenchError, match="take 510 tokens, and the model has a context of 400"):
        bench(server, tmp_path / "a", tokenizer_file, prompts=(500,), outputs=(10,))
    with pytest.raises(BenchError, match="--runs must be from 1"):
        bench(server, tmp_path / "a", tokenizer_file, runs=0)


def test_comparing(tmp_path: Path, tokenizer_file: Path) -> None:
    def session(name: str, gap: float, num_tokens: int | None = None, **sizes: Any) -> Path:
        def choose(body: dict[str, Any]) -> Plan:
            return Plan.of_tokens([0.5] + [gap] * ((num_tokens or body["max_tokens"]) - 1), prompt_tokens=32)

        bench(StandinServer(choose, standin_server.models(TINY)), tmp_path / name, tokenizer_file, **sizes)
        return tmp_path / name

    ours = session("ours", 0.05)
    text = report.markdown(compare.compare(ours, session("theirs", 0.1)))
    ratio = r"0\.50 \(0\.(49|50)-0\.5[01]\)"
    assert re.search(rf"^\| 32 \| 16 \| 2 \| 4 \| 1\.60 \([^|]*\| 1\.00 [^|]*\| {ratio} \| {ratio} \|", text, re.M)
    for wrong, message in (
        (session("longer", 0.05, outputs=(20,)), r"different workloads.*cells.*16 out.*20 out"),
        (session("more runs", 0.05, runs=3), "different workloads.*runs: 2 and 3"),
        (session("ends early", 0.05, 9), "did not do the same work: tokens an answer are 16.0 and 9.0"),
        (tmp_path / "nothing", "holds no session"),
    ):
        with pytest.raises(BenchError, match=message):
            compare.compare(ours, wrong)
    (tmp_path / "theirs" / "run.json").write_text('{"format": 0, "workload": {}}')
    with pytest.raises(BenchError, match="another version"):
        compare.compare(ours, tmp_path / "theirs")


def test_reports_escape_what_servers_say() -> None:
    blocks = [report.Heading(1, "a <b> & `c`"), report.Table(("x|y",), (("<script>",),)), report.Paragraph("**b**")]
    page = report.page(blocks)
    assert "<h1>a &lt;b&gt; &amp; <code>c</code></h1>" in page
    assert "<td>&lt;script&gt;</td>" in page
    assert "<p><b>b</b></p>" in page
    assert report.markdown(blocks).splitlines()[2] == r"| x\|y |"
