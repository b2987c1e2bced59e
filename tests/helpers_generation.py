"""What tests of generations share: the answer they expect, and steps and prompts that they hold."""

from typing import Any

import pytest
from helpers_engine import Gate, expected_text
from helpers_served import Answer

from mlxserve.core.request import FinishReason
from mlxserve.engine import prompt_reader

CAT = expected_text("the cat", 40)


def hold_tokeniser(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate in front of every prompt that is tokenised."""
    gate = Gate()
    encode = prompt_reader.encode_prompt

    def held_encode(*args: Any) -> list[int]:
        gate()
        return encode(*args)

    monkeypatch.setattr(prompt_reader, "encode_prompt", held_encode)
    return gate


async def go_on(gate: Gate, num_steps: int) -> None:
    """From one step held at the gate to a later one."""
    for _ in range(num_steps):
        gate.let_go()
        await gate.arrival()


def assert_finished(answer: Answer, reason: FinishReason, text: str, stop_string: str | None = None) -> None:
    assert answer.error is None
    assert answer.finished is not None
    assert (answer.text, answer.finished.reason, answer.finished.stop_string) == (text, reason, stop_string)
