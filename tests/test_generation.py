"""From prompt to events on a fake runner: how answers end, who is let in, and what readers, log and observer get."""

import asyncio
import logging
from typing import Any

import pytest
from helpers_engine import CONTEXT_LENGTH, FakeRunner, Gate, expected_text, held, letter_ids, on_loop, tokenizer
from helpers_generation import CAT, assert_finished, go_on
from helpers_served import Answer, read, serving

from mlxserve.core.generation import GenerationRequest, TextDelta, TokenPrompt
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine import prompt_reader
from mlxserve.engine.generation import Generation
from mlxserve.errors import ContextLengthExceeded, InvalidParameter, QueueFull, RequestCancelled

# --- how answers end ---


@on_loop
async def test_max_tokens() -> None:
    async with serving() as served:
        answer = await read(await served.start(max_tokens=12))
        assert_finished(answer, FinishReason.LENGTH, CAT[:12])
        assert answer.finished.usage.num_generated_tokens == answer.num_tokens == 12
        assert answer.finished.usage.num_prompt_tokens == len(tokenizer().encode("the cat", add_special_tokens=True))
        await served.idle()


@on_loop
async def test_the_end_of_the_context() -> None:
    async with serving() as served:
        answer = await read(await served.start(max_tokens=None))
        usage = answer.finished.usage
        assert usage.num_prompt_tokens + usage.num_generated_tokens == CONTEXT_LENGTH
        assert answer.finished.reason is FinishReason.LENGTH


@on_loop
async def test_end_of_sequence() -> None:
    async with serving(FakeRunner(answer_length=7)) as served:
        answer = await read(await served.start(max_tokens=20))
        assert_finished(answer, FinishReason.STOP, CAT[:7])
        # The token that ends it is counted, and is no part of the answer.
        assert (answer.finished.usage.num_generated_tokens, answer.num_tokens) == (8, 7)
        await served.idle()


@on_loop
async def test_an_answer_of_nothing_is_an_answer() -> None:
    async with serving(FakeRunner(answer_length=0)) as served:
        answer = await read(await served.start())
        assert_finished(answer, FinishReason.STOP, "")
        assert answer.deltas == []


@on_loop
async def test_ignore_eos() -> None:
    async with serving(FakeRunner(answer_length=3)) as served:
        answer = await read(await served.start(max_tokens=6, ignore_eos=True))
        assert answer.finished.reason is FinishReason.LENGTH
        assert answer.finished.usage.num_generated_tokens == 6


@on_loop
async def test_stop_token() -> None:
    first = CAT[0]
    stop = next(letter for letter in CAT if letter != first)
    token_id = letter_ids()["abcdefghijklmnop".index(stop)]
    async with serving() as served:
        answer = await read(await served.start(max_tokens=20, stop_token_ids=frozenset({token_id})))
        assert_finished(answer, FinishReason.STOP, CAT[: CAT.index(stop)])


@pytest.mark.parametrize("merged", [False, True])
@on_loop
async def test_stop_string_over_several_tokens(merged: bool) -> None:
    """Each letter is a token; unmerged, each is a delta too. The engine is told, and gives the blocks back."""
    stop = CAT[9:13]
    assert CAT.index(stop) == 9
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner) as served:
        generation = await served.start(max_tokens=None, stop=("zzz", stop))
        with held(gate):
            reading = None if merged else asyncio.create_task(read(generation))
            await gate.arrival()
            await go_on(gate, 13)
            answer = await (reading or read(generation))
            assert_finished(answer, FinishReason.STOP, CAT[:9], stop)
            assert answer.finished.usage.num_generated_tokens == answer.num_tokens == 13
            assert len(answer.deltas) == (1 if merged else 13)
            assert served.model.num_in_flight == 0
            # Not the context's end: the step after the one at the gate, at the latest, lets it go.
            if runner.steps[-1].released == ():
                await go_on(gate, 1)
            assert (runner.steps[-1].released, runner.steps[-1].decode) == (("r",), ())
        await served.idle()


@on_loop
async def test_a_stop_string_begun_at_the_end_is_text() -> None:
    async with serving() as served:
        answer = await read(await served.start(max_tokens=8, stop=(CAT[6:12],)))
        assert_finished(answer, FinishReason.LENGTH, CAT[:8])


@on_loop
async def test_a_stop_string_that_the_last_token_completes() -> None:
    async with serving() as served:
        answer = await read(await served.start(max_tokens=8, stop=(CAT[5:8],)))
        assert_finished(answer, FinishReason.STOP, CAT[:5], CAT[5:8])
        await served.idle()


@on_loop
async def test_a_cached_prompt_is_told_in_usage() -> None:
    async with serving() as served:
        first = await read(await served.start("a", "the dog ate the log and sat on the mat and the mat"))
        second = await read(await served.start("b", "the dog ate the log and sat on the mat and the mat"))
        assert second.text == first.text
        usage = second.finished.usage
        assert first.finished.usage.num_cached_tokens == 0
        assert usage.num_cached_tokens == usage.num_prompt_tokens - 1


@on_loop
async def test_token_prompts() -> None:
    async with serving() as served:
        ids = tuple(tokenizer().encode("the cat", add_special_tokens=True))
        request = GenerationRequest("r", TokenPrompt(ids), SamplingParams(temperature=0.0, max_tokens=5))
        assert (await read(await served.model.generate(request))).text == CAT[:5]


# --- readers ---


@on_loop
async def test_a_slow_reader_gets_merged_deltas() -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner) as served:
        generation = await served.start(max_tokens=30)
        with held(gate):
            gate.let_go()
            first = await anext(generation)
            assert isinstance(first, TextDelta)
        await served.idle()
        await served.settled()
        answer = await read(generation)
        assert len(answer.deltas) == 1
        assert first.text + answer.text == CAT[:30]
        assert len(first.tokens) + answer.num_tokens == 30


@on_loop
async def test_a_reader_that_never_comes_holds_no_blocks_and_gets_its_end_when_it_does() -> None:
    async with serving() as served:
        generation = await served.start(max_tokens=30)
        other = await read(await served.start("other", max_tokens=5))
        assert other.finished is not None
        await served.idle()
        assert served.model.num_in_flight == 1
        assert served.observer.outcomes() == {"other": "length"}
        await served.settled()
        assert_finished(await read(generation), FinishReason.LENGTH, CAT[:30])
        assert served.model.num_in_flight == 0


# --- admission ---


@on_loop
async def test_the_queue_is_bounded_before_anything_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokenised = 0
    encode = prompt_reader.encode_prompt

    def counted_encode(*args: Any) -> list[int]:
        nonlocal num_tokenised
        num_tokenised += 1
        return encode(*args)

    monkeypatch.setattr(prompt_reader, "encode_prompt", counted_encode)
    async with serving(max_num_seqs=2, max_queue=3) as served:
        with held(Gate()) as gate:
            served.thread.call(gate)
            starts = [served.start(f"r{i}") for i in range(12)]
            results = await asyncio.gather(*starts, return_exceptions=True)
        accepted = [result for result in results if isinstance(result, Generation)]
        refused = [result for result in results if isinstance(result, QueueFull)]
        assert (len(accepted), len(refused), num_tokenised) == (5, 7, 5)
        assert all(error.retry_after > 0 for error in refused)
        # Whoever was accepted is answered, also when all of them were there before the first step.
        for generation in accepted:
            assert_finished(await read(generation), FinishReason.LENGTH, CAT[:8])
        assert_finished(await read(await served.start("again")), FinishReason.LENGTH, CAT[:8])


@on_loop
async def test_prompts_that_are_too_long() -> None:
    async with serving() as served:
        for num_tokens in (CONTEXT_LENGTH, CONTEXT_LENGTH + 1):
            request = GenerationRequest("r", TokenPrompt((65,) * num_tokens), SamplingParams(temperature=0.0))
            with pytest.raises(ContextLengthExceeded) as too_long:
                await served.model.generate(request)
            assert (too_long.value.num_tokens, too_long.value.limit) == (num_tokens, CONTEXT_LENGTH)
        with pytest.raises(ContextLengthExceeded):
            await served.start("text", "the cat " * 100_000)
        request = GenerationRequest("fits", TokenPrompt((65,) * (CONTEXT_LENGTH - 1)), SamplingParams(temperature=0.0))
        answer = await read(await served.model.generate(request))
        assert answer.finished.usage.num_generated_tokens == 1
        assert served.model.num_in_flight == 0


@on_loop
async def test_an_id_in_flight_is_refused_and_free_again_after_its_end() -> None:
    async with serving() as served:
        with held(Gate()) as gate:
            served.thread.call(gate)
            first = await served.start("r", max_tokens=3)
            with pytest.raises(InvalidParameter, match="in flight"):
                await served.start("r")
            both = await asyncio.gather(
                *(served.start("twice", max_tokens=3) for _ in range(2)), return_exceptions=True
            )
            assert sorted(type(result).__name__ for result in both) == ["Generation", "InvalidParameter"]
        assert_finished(await read(first), FinishReason.LENGTH, CAT[:3])
        with held(Gate()) as gate:
            served.thread.call(gate)
            second = await served.start("r", max_tokens=4)
            second.cancel()
            third = await served.start("r", max_tokens=5)
        assert isinstance((await read(second)).error, RequestCancelled)
        assert_finished(await read(third), FinishReason.LENGTH, CAT[:5])


@on_loop
async def test_an_empty_stop_string_is_refused_and_leaves_nothing_behind() -> None:
    async with serving() as served:
        with pytest.raises(InvalidParameter):
            await served.start(stop=("",))
        assert served.model.num_in_flight == 0


@on_loop
async def test_a_thousand_requests_at_once() -> None:
    async with serving(max_queue=1000, max_num_seqs=32) as served:

        async def one(i: int) -> Answer:
            return await read(await served.start(f"r{i}", f"the dog {i % 50}", max_tokens=2))

        answers = await asyncio.gather(*(one(i) for i in range(1000)))
        for i, answer in enumerate(answers):
            assert_finished(answer, FinishReason.LENGTH, expected_text(f"the dog {i % 50}", 2))
        assert len(served.observer.outcomes()) == 1000
        assert served.model.num_in_flight == 0
        await served.idle()


# --- log and observer ---


@on_loop
async def test_the_log_line_has_the_numbers_and_not_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving() as served:
            await read(await served.start("request-7", "the secret cat", max_tokens=6))
            (await served.start("request-8", "the secret dog", max_tokens=6)).cancel()
            with pytest.raises(ContextLengthExceeded):
                await served.start("request-9", "the secret log " * 1000)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request id=")]
    assert len(lines) == 3
    prompt_tokens = len(tokenizer().encode("the secret cat", add_special_tokens=True))
    fields = dict(part.split("=") for part in lines[0].removeprefix("request ").split())
    assert float(fields.pop("ttft").removesuffix("s")) >= 0.0
    assert float(fields.pop("tokens_per_s")) > 0.0
    assert fields == {
        "id": "request-7",
        "model": "fake",
        "prompt_tokens": str(prompt_tokens),
        "cached_tokens": "0",
        "generated_tokens": "6",
        "drafts_accepted": "0/0",
        "reasoning_tokens": "0",
        "finish": "length",
    }
    assert "id=request-8 " in lines[1]
    assert lines[1].endswith("finish=cancelled")
    assert lines[2].endswith("finish=ContextLengthExceeded")
    answer = expected_text("the secret cat", 6)
    assert not any(text in caplog.text for text in ("secret", answer))


@on_loop
async def test_the_observer_gets_a_record_and_the_intervals_of_each_request() -> None:
    async with serving() as served:
        answers = await asyncio.gather(*[read(await served.start(f"r{i}", max_tokens=5 + i)) for i in range(3)])
        assert len(served.observer.intervals) == 4 + 5 + 6
        assert all(seconds >= 0.0 for seconds in served.observer.intervals)
        records = {record.request_id: record for record in served.observer.records}
        for i, answer in enumerate(answers):
            record = records[f"r{i}"]
            assert (record.model, record.outcome) == ("fake", "length")
            assert (record.usage, record.timings) == (answer.finished.usage, answer.finished.timings)
