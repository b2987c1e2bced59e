"""A request's own context length, and the token ids by which an answer can be gone on from."""

from dataclasses import replace

import pytest
from helpers_engine import CONTEXT_LENGTH, FakeRunner, on_loop
from helpers_served import make_generation_request, read, serving

from mlxserve.core.generation import GenerationRequest, TokenPrompt
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.errors import ContextLengthExceeded

PROMPT = TokenPrompt((65,) * 10)
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(("asked", "limit"), [(14, 14), (None, CONTEXT_LENGTH), (CONTEXT_LENGTH + 1, CONTEXT_LENGTH)])
@on_loop
async def test_the_shorter_of_two_lengths_ends_the_answer(asked: int | None, limit: int) -> None:
    async with serving() as served:
        request = GenerationRequest("r", PROMPT, GREEDY, context_length=asked)
        answer = await read(await served.model.generate(request))
        assert answer.finished.reason is FinishReason.LENGTH
        assert answer.finished.usage.num_generated_tokens == limit - 10
        await served.idle()


@on_loop
async def test_a_prompt_that_the_requests_own_length_leaves_no_room_for() -> None:
    async with serving() as served:
        for request in (
            GenerationRequest("r", PROMPT, GREEDY, context_length=10),
            replace(make_generation_request(prompt="the cat " * 20), context_length=10),
        ):
            with pytest.raises(ContextLengthExceeded) as too_long:
                await served.model.generate(request)
            assert too_long.value.limit == 10
        assert served.model.num_in_flight == 0


@on_loop
async def test_token_ids_are_those_of_prompt_and_answer_to_its_end() -> None:
    async with serving(FakeRunner(answer_length=5)) as served:
        generation = await served.model.generate(GenerationRequest("r", PROMPT, GREEDY))
        assert generation.token_ids == list(PROMPT.token_ids)
        answer = await read(generation)
        shown = [token.token_id for delta in answer.deltas for token in delta.tokens]
        *head, end = generation.token_ids
        assert head == [*PROMPT.token_ids, *shown]
        assert end in served.model.tokenizer.eos_token_ids
