"""One answer on its way out: the events of its generations as a stream of chunks, or collected into one object."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.api.failures import log_failure
from mlxserve.api.openai.errors import error_object
from mlxserve.api.openai.reply import AnswerDelta, Envelope, Reply, progress_object, timings_object, usage_object
from mlxserve.api.sse import DONE, event
from mlxserve.core.generation import (
    Finished,
    GenerationEvent,
    PrefillProgress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from mlxserve.errors import EngineError

if TYPE_CHECKING:
    from mlxserve.engine.generation import Generation


@dataclass(frozen=True, slots=True)
class Answer:
    envelope: Envelope
    reply: Reply
    generations: "Sequence[Generation]"
    """`num_samples` for each prompt, in order."""
    include_usage: bool
    """Whether a stream ends with a chunk of usage; an object always has it."""
    include_timings: bool
    num_samples: int = 1
    num_choices: int = 1
    """Of each prompt's samples so many are shown: all, or the ones with the highest log-probability a token."""

    async def collect(self) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
            EngineError, RequestTimeout, RequestCancelled: a generation ended so.
        """
        deltas: list[list[AnswerDelta]] = [[] for _ in self.generations]
        finished: dict[int, Finished] = {}
        prompts: dict[int, PromptLogprobs] = {}
        async for index, item in self._ordered():
            match item:
                case Finished():
                    finished[index] = item
                case PromptLogprobs():
                    prompts[index] = item
                case TextDelta() | ReasoningDelta() | ToolCallDelta():
                    deltas[index].append(item)
        shown: list[int] = []
        for first in range(0, len(self.generations), self.num_samples):
            samples = range(first, first + self.num_samples)
            if self.num_choices < self.num_samples:
                shown += sorted(samples, key=lambda sample: -_mean_logprob(deltas[sample]))[: self.num_choices]
            else:
                shown += samples
        choices = [
            self.reply.choice(sample, deltas[sample], finished[sample], prompts.get(sample)) | {"index": index}
            for index, sample in enumerate(shown)
        ]
        return self._with_totals(self.envelope.wrap(self.reply.kind, choices), finished)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events: opening chunks, deltas, finish chunks, usage if asked for, [DONE].

        A failure after the first byte can have no status of its own: it becomes an event with the error object, and the
        stream ends without [DONE], which is how OpenAI's clients tell a broken answer from a whole one.
        """
        try:
            async for chunk in self._chunks():
                yield event(chunk)
            yield DONE
        except Exception as error:
            log_failure(error, self.envelope.request_id)
            yield event(error_object(error)[1])

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        finished: dict[int, Finished] = {}
        for index in range(len(self.generations)):
            if (opening := self.reply.opening(index)) is not None:
                yield self._chunk([opening])
        async for index, item in self._ordered():
            match item:
                case Finished():
                    finished[index] = item
                    chunk = self._chunk([self.reply.finish(index, item)])
                    is_last = len(finished) == len(self.generations) and not self.include_usage
                    yield self._with_timings(chunk, item) if is_last else chunk
                    continue
                case PrefillProgress():
                    yield self._chunk([self.reply.empty(index)]) | {"prompt_progress": progress_object(item)}
                    continue
                case PromptLogprobs():
                    part = self.reply.prompt(index, item)
                case TextDelta() | ReasoningDelta() | ToolCallDelta():
                    part = self.reply.delta(index, item)
                case _:
                    continue
            if part is not None:
                yield self._chunk([part])
        if self.include_usage:
            yield self._with_totals(self._chunk([]), finished)

    async def _ordered(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """The events of all samples as they come, but each sample's PromptLogprobs before its answer, if asked for.

        Only the first sample of a prompt gives them. The other ones, which may be ahead of it, wait.
        """
        held: dict[int, list[GenerationEvent]] = {}
        if self.reply.wants_prompt_logprobs:
            held = {index: [] for index in range(len(self.generations))}
        async for index, item in _merge(self.generations):
            if isinstance(item, PromptLogprobs):
                for sample in range(index, index + self.num_samples):
                    for each in (item, *held.pop(sample)):
                        yield sample, each
            elif index in held and not isinstance(item, PrefillProgress):
                held[index].append(item)
            else:
                yield index, item

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self.envelope.wrap(self.reply.chunk_kind, choices)
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _with_totals(self, content: dict[str, Any], finished: Mapping[int, Finished]) -> dict[str, Any]:
        usages: list[Usage] = []
        for first in range(0, len(self.generations), self.num_samples):
            samples = [finished[index].usage for index in range(first, first + self.num_samples)]
            # A prompt counts once, as the sample found it that was computed first: the others hit what that one left.
            num_cached = min(usage.num_cached_tokens for usage in samples)
            num_generated = sum(usage.num_generated_tokens for usage in samples)
            num_reasoning = sum(usage.num_reasoning_tokens for usage in samples)
            num_prompt = samples[0].num_prompt_tokens
            usages.append(Usage(num_prompt, num_cached, num_generated, num_reasoning_tokens=num_reasoning))
        content["usage"] = usage_object(usages)
        return self._with_timings(content, finished[0])

    def _with_timings(self, content: dict[str, Any], finished: Finished) -> dict[str, Any]:
        if self.include_timings:
            content["timings"] = timings_object(finished.usage, finished.timings)
        return content


def _mean_logprob(deltas: Sequence[AnswerDelta]) -> float:
    """A token of an answer; an empty one is the worst."""
    logprobs = [token.logprobs.logprob for delta in deltas for token in delta.tokens if token.logprobs is not None]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


async def _merge(generations: "Sequence[Generation]") -> AsyncIterator[tuple[int, GenerationEvent]]:
    """The events of several generations as they come, each with the index of its generation.

    Raises:
        MlxserveError: a generation failed; the others are not waited for.
    """
    ended = 0
    if len(generations) == 1:
        # The usual case, without a task for each event.
        async for item in generations[0]:
            ended += isinstance(item, Finished)
            yield 0, item
    else:
        waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(generations)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    item = task.result()
                    if isinstance(item, Finished):
                        ended += 1
                    else:
                        waiting[asyncio.ensure_future(anext(generations[index]))] = index
                    yield index, item
        finally:
            for task in waiting:
                task.cancel()
    if ended < len(generations):
        raise EngineError("the generation ended without saying why; try again")
