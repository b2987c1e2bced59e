"""Decode speed with speculation against without, in one process: the same prompts in turns, greedily.

Three prompts are copy-heavy: an edit, a list, a quotation; the others have answers of their own. Every answer must be
the same with and without. Time counts from the first token to the last; figures are medians over the turns, speed-ups
medians of the ratios of neighbouring turns.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field

from mlxserve import blas
from mlxserve.config import EngineConfig

SETTINGS = """\
HOST = "127.0.0.1"
PORT = 8080
TIMEOUT = 30
MAX_CONNECTIONS = 100
LOG_LEVEL = "info"
LOG_FILE = "server.log"
DATABASE = "data/main.db"
CACHE_SIZE = 256
RETRIES = 3
BACKUP = True
BACKUP_FOLDER = "data/backup"
ADMIN_EMAIL = "admin@example.com"
"""
FRUITS = (
    "apples oranges bananas cherries grapes melons peaches plums pears lemons limes mangoes kiwis figs dates apricots "
    "coconuts papayas quinces olives"
)
LIST = "\n".join(f"- {fruit}" for fruit in FRUITS.split())
TEXT = """\
The lighthouse stood at the end of the pier. Every evening at six the keeper climbed its ninety steps, trimmed the wick
and lit the lamp. Ships that came from the north saw it first as a spark, then as a star, then as a steady white beam.
In the winter of the great storm the lamp went out for one hour, and in that hour two boats ran onto the rocks.
"""


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str
    is_chat: bool = True


PROMPTS = (
    Prompt(
        "edit this code",
        f"settings.py, before:\n\n```python\n{SETTINGS}```\n\n"
        "settings.py, after PORT was changed to 9090 and RETRIES to 5:\n\n```python\nHOST",
        is_chat=False,
    ),
    Prompt("repeat this list", f"Repeat this list exactly, one item per line:\n{LIST}"),
    Prompt("quote this text", f'The text, once:\n\n"{TEXT}"\n\nThe text, a second time:\n\n"The', is_chat=False),
    Prompt("a story", "Tell me a story about a dragon who learns to paint."),
    Prompt("an explanation", "Explain how a steam engine works, for a child of ten."),
)


@dataclass
class Measured:
    """What the turns of one prompt under one kind of speculation came to."""

    seconds: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder or .gguf file")
    parser.add_argument("--draft-model", default=None, help="alias, folder or .gguf file of the same vocabulary")
    parser.add_argument("--kinds", nargs="+", default=["auto"], choices=["auto", "ngram", "draft"])
    parser.add_argument("--only", default="", metavar="WORD", help="prompts whose name has this word")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument(
        "--streams", type=int, default=1, help="copies of the prompt that are answered at the same time"
    )
    parser.add_argument("--threads", type=int, default=None, help="threads of the BLAS")
    parser.add_argument("--show", action="store_true", help="print the answers")
    arguments = parser.parse_args()
    if "draft" in arguments.kinds and arguments.draft_model is None:
        parser.error("--kinds draft needs --draft-model")
    info = blas.preload(arguments.threads)
    bench = SpeculationBench(arguments.model, arguments.draft_model, arguments.kinds)
    print(f"{arguments.model}, {platform.machine()}, {os.cpu_count()} cores, {bench.device.name}, BLAS: {info}")
    print(f"greedy, {arguments.streams} streams, up to {arguments.tokens} tokens, {arguments.turns} turns\n")
    print("| prompt | tokens | kind | tokens/s | accepted | speed-up |\n|---|---|---|---|---|---|")
    for prompt in (prompt for prompt in PROMPTS if arguments.only in prompt.name):
        for line in bench.rows(prompt, arguments.turns, arguments.tokens, arguments.streams, show=arguments.show):
            print(line, flush=True)


class SpeculationBench:
    def __init__(self, model: str, draft_model: str | None, kinds: list[str]) -> None:
        from mlxserve.core.request import Speculation
        from mlxserve.engine import build
        from mlxserve.store import hub, loader
        from mlxserve.store.registry import Registry

        self.device = build.configure_device()

        def load(name: str) -> loader.LoadedModel:
            source = Registry().resolve(name, allow_paths=True)
            return loader.load(hub.ensure_local(source), name=name, dtype_policy=self.device.dtype_policy)

        self.loaded = load(model)
        draft = None if draft_model is None else load(draft_model)
        config = EngineConfig(enable_prefix_caching=False)
        built = build.build_engine(self.loaded, config, self.device, self.loaded.context_length, draft=draft)
        self.engine = built.engine
        self.kinds = [Speculation.OFF, *map(Speculation, kinds)]

    def rows(self, prompt: Prompt, num_turns: int, max_tokens: int, num_streams: int, *, show: bool) -> list[str]:
        measured = {kind: Measured() for kind in self.kinds}
        prompt_ids = self._encode(prompt)
        expected: list[list[int]] | None = None
        for turn in range(num_turns + 1):
            for kind, of_kind in measured.items():
                answers, seconds, num_drafts, num_accepted = self._answer(prompt_ids, kind, max_tokens, num_streams)
                expected = expected or answers
                if answers != expected:
                    sys.exit(f"{prompt.name}: another answer with speculation {kind.value}")
                if turn > 0:  # the first one compiles
                    of_kind.seconds.append(seconds)
                    of_kind.num_drafts, of_kind.num_accepted = num_drafts, num_accepted
        assert expected is not None
        if show:
            print(self.loaded.tokenizer.decode(expected[0]), file=sys.stderr)
        num_tokens = sum(map(len, expected))
        off, *others = self.kinds
        lines = []
        for kind in (off, *others):
            of_kind = measured[kind]
            rate = (num_tokens - num_streams) / statistics.median(of_kind.seconds)
            accepted = f"{of_kind.num_accepted} of {of_kind.num_drafts}" if of_kind.num_drafts else ""
            ratios = [a / b for a, b in zip(measured[off].seconds, of_kind.seconds, strict=True)]
            speed_up = "" if kind is off else f"{statistics.median(ratios):.2f}"
            lines.append(f"| {prompt.name} | {num_tokens} | {kind.value} | {rate:.1f} | {accepted} | {speed_up} |")
        return lines

    def _encode(self, prompt: Prompt) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if not prompt.is_chat:
            return list(tokenizer.encode(prompt.text))
        messages = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)

    def _answer(
        self, prompt_ids: list[int], kind: str, max_tokens: int, num_streams: int
    ) -> tuple[list[list[int]], float, int, int]:
        """The answers, seconds from the first token to the last, drafts computed, drafts accepted."""
        from mlxserve.core.request import Request, Speculation
        from mlxserve.core.sampling_params import SamplingParams

        requests = [
            Request(
                request_id=f"{index}",
                prompt_token_ids=prompt_ids,
                sampling=SamplingParams(temperature=0.0),
                eos_token_ids=self.loaded.eos_token_ids,
                seed=0,
                max_total_tokens=len(prompt_ids) + max_tokens,
                arrival_time=time.monotonic(),
                speculation=Speculation(kind),
            )
            for index in range(num_streams)
        ]
        for request in requests:
            self.engine.add(request)
        began = None
        while self.engine.has_work:
            self.engine.step()
            if began is None and all(request.num_output_tokens for request in requests):
                began = time.perf_counter()
        assert began is not None
        seconds = time.perf_counter() - began
        answers = [request.token_ids[len(prompt_ids) :] for request in requests]
        num_drafts = sum(request.num_draft_tokens for request in requests)
        return answers, seconds, num_drafts, sum(request.num_accepted_tokens for request in requests)


if __name__ == "__main__":
    main()
