"""Constrained requests in engines: company, preemption, steps ahead, failed steps, models on mlx-lm's caches."""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.nn as nn
import pytest
import tiny_models
import tiny_tokenizers
from helpers_arrivals import Answers, serve

from mlxserve.core.constraint import ConstrainedRow, Grammar, MaskSource, TokenMasks
from mlxserve.core.request import FinishReason, Request, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import DecodeRow, RequestOutput, ScheduledStep, StepResult
from mlxserve.engine import engine as engine_module
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.errors import EngineError
from mlxserve.runner import device
from mlxserve.runner.fallback_runner import FallbackRunner
from mlxserve.runner.model_runner import ModelRunner, StartedStep
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import compute_masks
from mlxserve.text.tokenizer import Tokenizer

PATTERNS = ["[a-z ]{30}", None, "(the|then|them)( (cat|dog|mat)){5,9}", "[0-9]{25}!", None, "a{40}", "[abc]{3,6}", None]
BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 4
"""Of the tiny checkpoints: layers, key/value heads, key and value dimensions, float32."""
SMALL_POOL = 9 * 16 * BYTES_PER_TOKEN
"""Blocks for little more than the longest request."""


@functools.cache
def tokenizer() -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def request(name: str, pattern: str | None, *, max_tokens: int = 50, **sampling: Any) -> Request:
    index = int(name)
    params = SamplingParams(**{"temperature": 1.0, "seed": index} | sampling)
    made = tiny_models.make_request(name, tiny_models.prompt(4 + 7 * index, seed=index), max_tokens, params)
    constraint = None if pattern is None else compiler().compile(Grammar("regex", pattern, "regex"))
    return dataclasses.replace(made, eos_token_ids=tokenizer().eos_token_ids, constraint=constraint)


def requests(speculation: Speculation = Speculation.AUTO) -> list[Request]:
    made = [request(f"{index}", pattern) for index, pattern in enumerate(PATTERNS)]
    for each in made:
        each.speculation = speculation
    return made


def build(name: str = "llama", *, run_ahead: bool = False, draft: nn.Module | None = None, **settings: Any) -> Engine:
    loaded = tiny_models.loaded(tiny_models.build(name))
    config = tiny_models.engine_config(**settings)
    length = tiny_models.CONTEXT_LENGTH
    loaded_draft = None if draft is None else tiny_models.loaded(draft)
    return build_engine(loaded, config, device.detect(), length, run_ahead=run_ahead, draft=loaded_draft).engine


def at_once(engine: Engine, made: Sequence[Request]) -> dict[str, list[int]]:
    answers = serve(engine, [(0, each) for each in made])
    return {name: answers.ids(name) for name in answers.tokens}


@functools.cache
def expected() -> dict[str, list[int]]:
    """Each request's answer when it is the only one."""
    engine = build(max_num_seqs=1)
    alone: dict[str, list[int]] = {}
    for each in requests():
        alone |= at_once(engine, [each])
    return alone


def text_of(ids: Sequence[int]) -> str:
    return b"".join(
        tokenizer().token_bytes(token_id) for token_id in ids if token_id not in tokenizer().eos_token_ids
    ).decode()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_and_other_rows_share_steps(name: str, temperature: float) -> None:
    """On the block cache and on mlx-lm's caches; the others' answers are what they are without such company."""
    engine = build(name)
    made = [request(f"{index}", pattern, temperature=temperature) for index, pattern in enumerate(PATTERNS)]
    together = at_once(engine, made)
    for index, pattern in enumerate(PATTERNS):
        if pattern is not None:
            checked = compiler().compile(Grammar("regex", pattern, "regex"))
            ids = together[f"{index}"]
            assert checked.num_accepted(ids) == len(ids)
    free = [
        request(f"{index}", None, temperature=temperature) for index, pattern in enumerate(PATTERNS) if pattern is None
    ]
    assert {name: together[name] for name in ("1", "4", "7")} == at_once(build(name), free)


def test_an_answer_does_not_depend_on_company_preemption_and_chunks() -> None:
    assert at_once(build(), requests()) == expected()
    small = build(kv_cache_bytes=SMALL_POOL, max_prefill_tokens=16)
    assert at_once(small, requests()) == expected()
    assert small.stats().num_preemptions > 0


def test_logits_are_launched_before_masks_are_computed_and_steps_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[ScheduledStep] = []
    stock = ModelRunner.run

    def run(self: ModelRunner, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        assert pickle.loads(pickle.dumps(step)) == step
        steps.append(step)
        return stock(self, step, masks)

    num_rows: list[int] = []

    def counted(rows: Sequence[ConstrainedRow], total: int) -> TokenMasks:
        num_rows.append(len(rows))
        return compute_masks(rows, total)

    monkeypatch.setattr(engine_module, "compute_masks", counted)
    monkeypatch.setattr(ModelRunner, "run", run)
    assert at_once(build(), requests()) == expected()
    # Masks are asked for just in steps with constrained rows, and of these alone.
    wanted = [sum(row.is_constrained for row in step.decode) for step in steps if step.step_id > 0 or step.decode]
    assert [count for count in wanted if count] == num_rows
    assert any(0 < sum(row.is_constrained for row in step.decode) < len(step.decode) for step in steps)


# --- drafts ---


@pytest.mark.parametrize("draft_seed", [None, 1], ids=["of the text", "of a draft model"])
def test_drafts_within_a_grammar_change_no_answer(monkeypatch: pytest.MonkeyPatch, draft_seed: int | None) -> None:
    drafted: list[DecodeRow] = []
    stock = ModelRunner.run

    def run(self: ModelRunner, step: ScheduledStep, masks: MaskSource | None = None) -> StepResult:
        drafted.extend(row for row in step.decode if row.num_drafts)
        return stock(self, step, masks)

    monkeypatch.setattr(ModelRunner, "run", run)
    kind = Speculation.NGRAM if draft_seed is None else Speculation.DRAFT
    draft = None if draft_seed is None else tiny_models.build("llama", seed=draft_seed)
    made = requests(kind)
    assert at_once(build(draft=draft), made) == expected()
    assert any(row.is_constrained for row in drafted)
    # The draft model knows of no grammar, so its drafts are mostly not allowed.
    if kind is Speculation.NGRAM:
        assert any(request.num_accepted_tokens for request in made if request.constraint is not None)


# --- one step ahead ---


def test_steps_ahead_have_constrained_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ahead = 0
    stock = ModelRunner.start

    def start(
        self: ModelRunner, step: ScheduledStep, after: StartedStep | None, masks: MaskSource | None = None
    ) -> StartedStep:
        nonlocal num_ahead
        num_ahead += after is not None and any(row.is_constrained for row in step.decode)
        return stock(self, step, after, masks)

    monkeypatch.setattr(ModelRunner, "start", start)
    assert at_once(build(run_ahead=True), requests(Speculation.OFF)) == expected()
    assert num_ahead > 20


def test_late_arrivals_and_preemption_one_step_ahead() -> None:
    engine = build(run_ahead=True, kv_cache_bytes=SMALL_POOL)
    answers = serve(engine, [(4 * index, each) for index, each in enumerate(requests())])
    assert {name: answers.ids(name) for name in answers.tokens} == expected()
    assert engine.stats().num_preemptions > 0


# --- failures ---


def fail_steps(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Steps whose number `when` picks fail after their masks were computed."""
    stock, num_calls = ModelRunner.finish, 0

    def finish(self: ModelRunner, started: StartedStep) -> StepResult:
        nonlocal num_calls
        num_calls += 1
        result = stock(self, started)
        if when(num_calls):
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(ModelRunner, "finish", finish)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_requests_that_a_failed_step_did_not_hold_go_on(monkeypatch: pytest.MonkeyPatch, run_ahead: bool) -> None:
    """Those that were preempted: their constraints have taken tokens, and go on from there on the new cache."""
    engine = build(run_ahead=run_ahead, kv_cache_bytes=SMALL_POOL)

    def when(number: int) -> bool:
        return number > 20 and number % 15 == 0 and engine.stats().num_preemptions > 0

    fail_steps(monkeypatch, when)
    answers = serve(engine, [(0, each) for each in requests()])
    assert answers.num_failures > 0
    survivors = [name for name, reason in answers.reasons.items() if reason is not FinishReason.ERROR]
    assert any(PATTERNS[int(name)] is not None for name in survivors)
    for name in survivors:
        assert answers.ids(name) == expected()[name]


def outputs_of(engine: Engine, made: Sequence[Request]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {each.request_id: [] for each in made}
    for each in made:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.stats().num_blocks_used == 0
    return outputs


@pytest.mark.parametrize(("name", "run_ahead"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_a_constraint_that_fails_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch, name: str, run_ahead: bool
) -> None:
    """After its sixth token, request 2 has no token left."""

    def failing(rows: Sequence[ConstrainedRow], total: int) -> TokenMasks:
        masks = compute_masks(rows, total)
        failures: Mapping[int, str] = {
            row.index: "why" for row in rows if row.constraint is victim and victim.num_tokens >= 6
        }
        return TokenMasks(masks.num_rows, masks.bits, {**masks.failures, **failures})

    undisturbed = at_once(build(name), requests())
    # Drafts would have it take several tokens at a time.
    made = requests(Speculation.OFF)
    victim = made[2].constraint
    assert victim is not None
    monkeypatch.setattr(engine_module, "compute_masks", failing)
    outputs = outputs_of(build(name, run_ahead=run_ahead), made)
    last = outputs["2"][-1]
    assert (last.finish_reason, last.tokens) == (FinishReason.ERROR, ())
    assert last.error == "the answer cannot go on within its grammar: why"
    assert [token.token_id for output in outputs["2"][:-1] for token in output.tokens] == undisturbed["2"][:6]
    for request_id, ids in undisturbed.items():
        if request_id != "2":
            assert [token.token_id for output in outputs[request_id] for token in output.tokens] == ids
            assert all(output.error is None for output in outputs[request_id])


def test_a_token_that_the_grammar_does_not_allow_ends_the_request() -> None:
    """Whatever brought it about: here another vocabulary than the model's."""
    engine = build()
    made = request("2", "[a-z]{9}")
    made.token_ids.append(tokenizer().encode("!", add_special_tokens=False)[0])
    made.max_total_tokens += 1
    outputs = outputs_of(engine, [made, request("1", None)])
    assert outputs["2"][-1].finish_reason is FinishReason.ERROR
    assert "doesn't satisfy the grammar" in str(outputs["2"][-1].error)
    assert outputs["1"][-1].finish_reason is not FinishReason.ERROR


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_runner_that_is_given_no_masks_says_so(name: str) -> None:
    engine = build(name)
    runner = engine._runner
    assert isinstance(runner, (ModelRunner, FallbackRunner))
    engine.add(request("1", "a+"))
    step = engine._scheduler.schedule(0.0)
    assert step is not None
    while not step.decode:
        engine._scheduler.update(step, runner.run(step), 0.0)
        step = engine._scheduler.schedule(0.0)
        assert step is not None
    with pytest.raises(EngineError, match="needs their masks"):
        runner.run(step)


def test_answers_of_constrained_requests_are_texts_of_their_grammars() -> None:
    answers: Answers = serve(build(), [(0, each) for each in requests()])
    assert text_of(answers.ids("3"))[:25].isdigit()
    assert set(text_of(answers.ids("5"))) == {"a"}
    assert answers.reasons["6"] is FinishReason.STOP
