"""The real model through the engine: token ids and logprobs equal a reference computed by transformers in float32.

The reference stops being comparable where its two best logits come close; each case says after how many tokens.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from mlxserve.config import EngineConfig
from mlxserve.core.request import Request, Speculation
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import SampledToken
from mlxserve.engine import warm_up
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.runner import device
from mlxserve.store import loader
from mlxserve.store.loader import LoadedModel

pytestmark = pytest.mark.slow

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "smollm2-greedy.json").read_text())["cases"]
SHORT_CASES = [case for case in CASES if len(case["prompt_ids"]) < 100]
LOGPROB_TOLERANCE = 1e-3

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> LoadedModel:
    return loader.load(demo_model, name="smollm2-135m", dtype_policy="float32")


@pytest.fixture
def make_engine(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Engines on the same weights. Prefill chunks are as large as allowed, however long that makes a step."""
    monkeypatch.setattr(warm_up, "CHUNKS", (64,))
    monkeypatch.setattr(warm_up, "ROWS", (1,))
    monkeypatch.setattr(warm_up, "MIXED", ())
    monkeypatch.setattr(warm_up, "DRAFTS", (7,))

    def make(draft: LoadedModel | None = None, **settings: Any) -> Engine:
        config = EngineConfig(**({"target_itl_ms": 1e6, "kv_cache_bytes": 400_000_000} | settings))
        built = build_engine(loaded, config, device.detect(), loaded.context_length, draft=draft)
        assert built.uses_block_cache
        return built.engine

    return make


def make_requests(
    loaded: LoadedModel,
    cases: Sequence[dict[str, Any]],
    max_tokens: int = 64,
    speculation: Speculation = Speculation.AUTO,
) -> list[Request]:
    requests = []
    for case in cases:
        num_tokens = min(case["comparable"], max_tokens)
        request = tiny_models.make_request(
            case["name"], case["prompt_ids"], num_tokens, SamplingParams(temperature=0.0, num_logprobs=5)
        )
        request.eos_token_ids = loaded.eos_token_ids
        request.speculation = speculation
        requests.append(request)
    return requests


def check(requests: Sequence[Request], answers: dict[str, list[SampledToken]]) -> None:
    by_name = {case["name"]: case for case in CASES}
    assert answers.keys() == {request.request_id for request in requests}
    for request in requests:
        case, answer = by_name[request.request_id], answers[request.request_id]
        num_tokens = request.max_total_tokens - request.num_prompt_tokens
        assert [token.token_id for token in answer] == case["greedy_ids"][:num_tokens], case["name"]
        for token, expected in zip(answer, case["top_logprobs"], strict=False):
            assert token.logprobs is not None
            assert token.logprobs.logprob == pytest.approx(expected[0][1], abs=LOGPROB_TOLERANCE)
            found = dict(token.logprobs.top)
            assert len(found) == len(expected) == 5
            best = [logprob for _, logprob in token.logprobs.top]
            assert best == pytest.approx([logprob for _, logprob in expected], abs=LOGPROB_TOLERANCE)
            # The fifth and the sixth may be a tie.
            for token_id, logprob in expected[:4]:
                assert found[token_id] == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)


def test_all_at_once_in_large_chunks_with_drafts_of_the_text(loaded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=64, max_prefill_tokens=2048, max_num_seqs=8, enable_prefix_caching=False)
    requests = make_requests(loaded, CASES, speculation=Speculation.NGRAM)
    check(requests, tiny_models.run(engine, requests))
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens
    assert engine.stats().num_prefix_hit_tokens == 0


def test_one_at_a_time(loaded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=64, max_prefill_tokens=64)
    whole = [case for case in CASES if case["name"] in ("hello", "capital", "long900")]
    for case in CASES:
        requests = make_requests(loaded, [case], max_tokens=64 if case in whole else 8)
        check(requests, tiny_models.run(engine, requests))


def test_small_chunks_and_blocks_then_prefix_hits(loaded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=16, max_prefill_tokens=16, max_num_seqs=8)
    requests = make_requests(loaded, CASES)
    check(requests, tiny_models.run(engine, requests))

    hits_before = engine.stats().num_prefix_hit_tokens
    requests = make_requests(loaded, CASES, max_tokens=8)
    check(requests, tiny_models.run(engine, requests))
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    # All of every prompt but its last token, which is computed in any case.
    assert engine.stats().num_prefix_hit_tokens - hits_before == num_prompt_tokens - len(requests)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption(loaded: LoadedModel, make_engine: MakeEngine, enable_prefix_caching: bool) -> None:
    """A pool for four or so of eight sequences: some are thrown out, come back, and answer the same."""
    bytes_per_token = 2 * 3 * 64 * 4 * 30  # keys and values, heads, dimension, float32, layers
    engine = make_engine(
        block_size=16,
        max_prefill_tokens=64,
        kv_cache_bytes=18 * 16 * bytes_per_token,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = make_requests(loaded, SHORT_CASES[:8], max_tokens=32)
    check(requests, tiny_models.run(engine, requests))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().max_blocks == 18


@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "random"])
def test_drafts_of_a_model(loaded: LoadedModel, make_engine: MakeEngine, demo_model: Path, is_equal: bool) -> None:
    if is_equal:
        draft = loader.load(demo_model, name="draft", dtype_policy="float32")
    else:
        draft = tiny_models.loaded(tiny_models.build("llama", vocab_size=loaded.config["vocab_size"]))
    engine = make_engine(draft, max_num_seqs=4, block_size=16)
    requests = make_requests(loaded, SHORT_CASES[:4], max_tokens=24, speculation=Speculation.DRAFT)
    check(requests, tiny_models.run(engine, requests))
    num_accepted, num_drafts = engine.stats().num_accepted_tokens, engine.stats().num_draft_tokens
    assert num_accepted > 0.9 * num_drafts if is_equal else num_accepted < 0.1 * num_drafts
    assert num_drafts > 0
