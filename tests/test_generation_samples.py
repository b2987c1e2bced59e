"""Several samples of a prompt, and what else a request asks of the sampler, from prompt to events on a fake runner."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from helpers_engine import FakeRunner, Gate, expected_text, held, letter_ids, on_loop, tokenizer
from helpers_served import make_generation_request, read, serving

from mlxserve.core.constraint import MaskSource
from mlxserve.core.generation import PromptLogprobs
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import sample_seed
from mlxserve.core.step import ScheduledStep, StepResult, TokenLogprobs
from mlxserve.engine import prompt_reader
from mlxserve.errors import EngineError, InvalidParameter, QueueFull, RequestCancelled

CAT = expected_text("the cat", 40)


class ScoringRunner(FakeRunner):
    """Gives every scored token its own id as the log-probability."""

    def run(self, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        result = super().run(step, masks)
        scores = tuple(
            tuple(TokenLogprobs(-float(token_id), ()) for token_id in chunk.scored_ids)
            for chunk in step.prefill
            if chunk.scored_ids
        )
        return replace(result, scores=scores)


@on_loop
async def test_a_prompt_is_tokenised_once_and_each_sample_has_id_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokenised = 0
    encode = prompt_reader.encode_prompt

    def counted_encode(*args: Any) -> list[int]:
        nonlocal num_tokenised
        num_tokenised += 1
        return encode(*args)

    monkeypatch.setattr(prompt_reader, "encode_prompt", counted_encode)
    async with serving() as served:
        request = make_generation_request("r", "the cat", max_tokens=5, seed=11)
        generations = await served.model.generate_samples(request, 4)
        answers = await asyncio.gather(*map(read, generations))
        await served.idle()
        assert num_tokenised == 1
        assert [generation.request_id for generation in generations] == ["r-0", "r-1", "r-2", "r-3"]
        assert [answer.text for answer in answers] == [CAT[:5]] * 4
        seeds = {row.request_id: row.seed for step in served.runner.steps for row in step.decode}
        assert seeds == {f"r-{index}": sample_seed(11, index) for index in range(4)}
        num_prompt_tokens = answers[0].finished.usage.num_prompt_tokens
        assert sum(step.num_prefill_tokens for step in served.runner.steps) == num_prompt_tokens - 1
        assert sorted(served.observer.outcomes()) == ["r-0", "r-1", "r-2", "r-3"]


@on_loop
async def test_the_first_sample_of_a_seed_is_the_answer_without_others() -> None:
    async with serving() as served:
        for count in (1, 3):
            request = make_generation_request(f"{count}", "the cat", max_tokens=2, seed=11)
            await asyncio.gather(*map(read, await served.model.generate_samples(request, count)))
        seeds = {row.request_id: row.seed for step in served.runner.steps for row in step.decode}
        assert seeds["1"] == seeds["3-0"] == 11


@on_loop
async def test_samples_without_a_seed_have_seeds_apart() -> None:
    async with serving() as served:
        request = make_generation_request("r", "the cat", max_tokens=2)
        await asyncio.gather(*map(read, await served.model.generate_samples(request, 16)))
        assert len({row.seed for step in served.runner.steps for row in step.decode}) == 16


@on_loop
async def test_samples_that_do_not_all_fit_into_the_queue_are_refused_together() -> None:
    async with serving(max_num_seqs=2, max_queue=2) as served:
        request = make_generation_request("r", "the cat", max_tokens=2)
        with pytest.raises(InvalidParameter, match="takes 4 requests at a time, and each of 5 answers is one"):
            await served.model.generate_samples(request, 5)
        running = await served.model.generate_samples(request, 2)
        with pytest.raises(QueueFull):
            await served.model.generate_samples(replace(request, request_id="s"), 3)
        assert served.model.num_in_flight == 2
        assert len(await asyncio.gather(*map(read, running))) == 2
        assert len(await asyncio.gather(*map(read, await served.model.generate_samples(request, 4)))) == 4


@on_loop
async def test_samples_live_and_end_by_themselves() -> None:
    runner = FakeRunner()
    runner.before_step = gate = Gate()
    async with serving(runner) as served:
        request = make_generation_request("r", "the cat", max_tokens=6)
        first, second, third = await served.model.generate_samples(request, 3)
        with held(gate):
            await gate.arrival()
            first.cancel()
        answers = await asyncio.gather(*map(read, (first, second, third)))
        assert isinstance(answers[0].error, RequestCancelled)
        assert [answer.text for answer in answers[1:]] == [CAT[:6]] * 2
        await served.idle()


@on_loop
async def test_a_failed_step_ends_the_samples_in_it() -> None:
    runner = FakeRunner()

    def fail(step: ScheduledStep) -> None:
        if len(step.decode) == 3:
            raise RuntimeError("no memory")

    runner.before_step = fail
    async with serving(runner) as served:
        request = make_generation_request("r", "the cat", max_tokens=6)
        answers = await asyncio.gather(*map(read, await served.model.generate_samples(request, 3)))
        assert [type(answer.error) for answer in answers] == [EngineError] * 3
        await served.idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((5, 1.0), (70_000, 1.0))}, "logit_bias"),
        ({"stop_token_ids": frozenset({70_000})}, "stop_token_ids"),
    ],
)
@on_loop
async def test_tokens_the_model_does_not_have_are_refused(fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        with pytest.raises(InvalidParameter, match=rf"{param}.* 70000") as caught:
            await served.start(**fields)
        assert caught.value.param == param
        assert served.model.num_in_flight == 0


@on_loop
async def test_a_stop_string_within_min_tokens_is_text() -> None:
    """It is looked for in what comes after."""
    stop = CAT[3:5]
    assert CAT.count(stop) == 1
    async with serving() as served:
        for min_tokens in (0, 3):
            answer = await read(await served.start("r", max_tokens=20, min_tokens=min_tokens, stop=(stop,)))
            assert (answer.text, answer.finished.stop_string) == (CAT[:3], stop)
        for min_tokens in (4, 5, 20):
            answer = await read(await served.start("r", max_tokens=20, min_tokens=min_tokens, stop=(stop,)))
            assert (answer.text, answer.finished.reason) == (CAT[:20], FinishReason.LENGTH)


@on_loop
async def test_rows_carry_what_must_not_be_chosen_yet() -> None:
    async with serving() as served:
        stop = letter_ids()[0]
        await read(await served.start("r", max_tokens=4, min_tokens=2, stop_token_ids=frozenset({stop})))
        banned = [row.banned_token_ids for step in served.runner.steps for row in step.decode]
        ending = tuple(sorted({stop, *tokenizer().eos_token_ids}))
        assert banned[:3] == [ending, ending, ()]


@on_loop
async def test_prompt_logprobs_come_first_and_with_the_first_sample_only() -> None:
    async with serving(ScoringRunner(), max_prefill_tokens=8) as served:
        request = make_generation_request("r", "the cat sat on the mat", max_tokens=3, prompt_logprobs=0)
        generations = await served.model.generate_samples(request, 2)
        first, *rest = [event async for event in generations[0]]
        prompt_ids = tokenizer().encode("the cat sat on the mat", add_special_tokens=True)
        assert isinstance(first, PromptLogprobs)
        assert [token.token_id for token in first.tokens] == prompt_ids
        scores = [None if token.logprobs is None else token.logprobs.logprob for token in first.tokens]
        assert scores == [None, *(-float(token_id) for token_id in prompt_ids[1:])]
        others = [event async for event in generations[1]]
        assert not any(isinstance(event, PromptLogprobs) for event in [*rest, *others])
        assert others[-1].reason is FinishReason.LENGTH
