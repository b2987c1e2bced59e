"""Engines under requests that come one after another."""

from collections.abc import Iterable

from mlxserve.core.request import FinishReason, Request
from mlxserve.core.step import RequestOutput, SampledToken
from mlxserve.engine.engine import Engine, StepFailed


class Answers:
    """What came out of an engine, by request id; one last output each."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[SampledToken]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.num_failures = 0

    def ids(self, request_id: str) -> list[int]:
        return [token.token_id for token in self.tokens[request_id]]

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, f"{output.request_id}: an output after its last one"
            self.tokens[output.request_id] += output.tokens
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason


def serve(engine: Engine, arrivals: Iterable[tuple[int, Request]]) -> Answers:
    """Add each request before the step of its number, and step until all ended. The books must agree after each step.

    A failed step is followed by a rebuild that keeps the requests.
    """
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    answers = Answers()
    num_steps = 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= num_steps:
            request = pending.pop(0)[1]
            answers.tokens[request.request_id] = []
            engine.add(request)
        try:
            answers.take(engine.step())
        except StepFailed:
            answers.num_failures += 1
            answers.take(engine.rebuild(keep_requests=True))
        engine.check_integrity()
        num_steps += 1
    assert answers.reasons.keys() == answers.tokens.keys()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    return answers
