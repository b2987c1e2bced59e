"""What the tests of the load generator share: exact time, and a tokenizer to make prompts with."""

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from standin_server import VirtualTimeLoop
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers


def in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def approximately(value: float) -> Any:
    """The accuracy asked of the client: 2 ms or 2 %, whichever is more."""
    return pytest.approx(value, rel=0.02, abs=0.002)


def save_tokenizer(folder: Path) -> Path:
    """Byte-level: many short words, with a space in front and without; it puts a token of its own before a text."""
    source = random.Random(1)
    words = ["the", *("".join(source.choices("abcdefghij", k=4)) for _ in range(700))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator([" ".join(words), *words] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file
