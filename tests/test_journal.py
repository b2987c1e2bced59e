"""What the journal remembers of requests whose life is not simple."""

from collections import Counter

from helpers_engine import FakeRunner, on_loop
from helpers_served import Served, make_generation_request, read, serving

from mlxserve.core.step import ScheduledStep
from mlxserve.engine.journal import RequestTrace


def trace_of(served: Served, request_id: str) -> RequestTrace:
    found = served.model._journal.find(request_id)
    assert found is not None
    return found


def kinds(trace: RequestTrace) -> list[str]:
    return [event.kind for event in trace.events()]


@on_loop
async def test_preempted_and_resumed() -> None:
    # Each needs 6 of the 9 blocks at its end.
    async with serving(max_blocks=10) as served:
        generations = [await served.start(name, f"the {name}", max_tokens=40) for name in ("cat", "dog", "log")]
        answers = [await read(generation) for generation in generations]
        assert [answer.num_tokens for answer in answers] == [40] * 3
        traces = [trace_of(served, name) for name in ("cat", "dog", "log")]
        assert served.model.stats().num_preemptions == sum(trace.counts.num_preemptions for trace in traces) > 0
        for trace in traces:
            counts = Counter(kinds(trace))
            assert counts["preempted"] == counts["resumed"] == trace.counts.num_preemptions
            assert (trace.state, trace.outcome) == ("done", "length")
            times = [event.time for event in trace.events()]
            assert times == sorted(times)


@on_loop
async def test_samples_take_the_place_of_their_request() -> None:
    async with serving() as served:
        await served.start("one", max_tokens=2)
        generations = await served.model.generate_samples(make_generation_request("many", max_tokens=2), 2)
        names = [trace.request_id for trace in served.model._journal]
        assert names == ["one", "many-0", "many-1"]
        for generation in generations:
            await read(generation)
        assert trace_of(served, "many-1").state == "done"


@on_loop
async def test_cancelled_failed_and_stopped_requests_are_done() -> None:
    runner = FakeRunner()
    failing: list[bool] = []

    def fail(step: ScheduledStep) -> None:
        if failing:
            raise RuntimeError("out of memory")

    runner.before_step = fail
    async with serving(runner) as served:
        cancelled = await served.start("cancelled", max_tokens=None)
        cancelled.cancel()
        text = (await read(await served.start("whole"))).text
        await read(await served.start("stopped", stop=(text[2],)))
        failing.append(True)
        await read(await served.start("failed"))
        outcomes = {trace.request_id: trace.outcome for trace in served.model._journal}
        assert outcomes == {"cancelled": "cancelled", "whole": "length", "stopped": "stop", "failed": "EngineError"}
        assert {trace.state for trace in served.model._journal} == {"done"}
        assert all(trace.request is None for trace in served.model._journal)
        for trace in served.model._journal:
            stages = trace.timeline.stages()
            assert min(stages.front_end, stages.queue, stages.prefill, stages.decode, stages.delivery) >= 0
