"""Requests with a grammar after their thoughts in engines: company, drafts, preemption, steps ahead."""

import functools
import itertools
import re

import tiny_models
from helpers_arrivals import serve
from helpers_chat_models import SAID, model

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt
from mlxserve.core.request import Request, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.runner import device
from mlxserve.text.answer_format import AnswerFormat
from mlxserve.text.chat_template import render
from mlxserve.text.grammar import GrammarCompiler

TOKENIZER = model("r1")
PATTERN = "(the|then|them)( (cat|dog|mat)){5,9}"
SMALL_POOL = 9 * 16 * 3 * 2 * (16 + 16) * 4
"""Bytes of blocks for little more than the longest request."""


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER)


def requests(speculation: Speculation) -> list[Request]:
    """Six; of each kind one that soon stops to think, one that does so late and one that does not."""
    made = []
    prompt = ChatPrompt(SAID)
    opening = AnswerFormat(TOKENIZER).opening(prompt, render(TOKENIZER, prompt))
    assert opening is not None
    end = TOKENIZER.token_id("</think>")
    assert end is not None
    for index, (has_grammar, bias) in enumerate(itertools.product([True, False], [8.0, 4.0, -8.0])):
        params = SamplingParams(temperature=1.0, seed=index, logit_bias=((end, bias),))
        each = tiny_models.make_request(f"{index}", tiny_models.prompt(4 + 7 * index, seed=index), 60, params)
        each.eos_token_ids = TOKENIZER.eos_token_ids
        each.speculation = speculation
        if has_grammar:
            each.constraint = compiler().compile(Grammar("regex", PATTERN, "regex"), opening.copy())
        made.append(each)
    return made


def build(*, run_ahead: bool = False, **settings: int) -> Engine:
    loaded = tiny_models.loaded(tiny_models.build("llama"))
    config = tiny_models.engine_config(**settings)
    return build_engine(
        loaded, config, device.detect(), tiny_models.CONTEXT_LENGTH, run_ahead=run_ahead, draft=None
    ).engine


def at_once(engine: Engine, speculation: Speculation = Speculation.OFF) -> dict[str, list[int]]:
    answers = serve(engine, [(0, each) for each in requests(speculation)])
    return {name: answers.ids(name) for name in answers.tokens}


@functools.cache
def expected() -> dict[str, list[int]]:
    """Each request's answer when it is the only one."""
    engine = build(max_num_seqs=1)
    return at_once(engine)


def text_of(token_ids: list[int]) -> str:
    kept = [token_id for token_id in token_ids if token_id not in TOKENIZER.eos_token_ids]
    return b"".join(map(TOKENIZER.token_bytes, kept)).decode(errors="replace")


def test_the_grammar_holds_after_the_thoughts_and_not_before() -> None:
    texts = {name: text_of(ids) for name, ids in expected().items()}
    for name in ("0", "1"):
        _, _, answer = texts[name].partition("</think>")
        assert re.fullmatch(PATTERN, answer), texts[name]
    assert len(texts["1"].partition("</think>")[0]) > 10
    # One that never stops to think is cut off within its thoughts.
    assert len(expected()["2"]) == 60
    assert "</think>" not in texts["2"]


def test_company_and_preemption_change_no_answer() -> None:
    assert at_once(build()) == expected()
    small = build(kv_cache_bytes=SMALL_POOL, max_prefill_tokens=16)
    assert at_once(small) == expected()
    assert small.stats().num_preemptions > 0


def test_drafts_change_no_answer() -> None:
    engine = build()
    assert at_once(engine, Speculation.NGRAM) == expected()
    assert engine.stats().num_accepted_tokens > 0


def test_steps_ahead_change_no_answer() -> None:
    assert at_once(build(run_ahead=True)) == expected()
    assert at_once(build(run_ahead=True), Speculation.NGRAM) == expected()
