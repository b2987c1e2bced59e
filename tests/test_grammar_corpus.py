"""A corpus of schemas, expressions, grammars and choices, answered at temperature 1: whatever ended by itself is valid,
whatever was cut is the beginning of something valid.

A tiny random model answers all of it: nothing but the masks leads it to a valid text. Cut answers are finished byte by
byte by another matcher, over a vocabulary of single bytes, and what comes out is checked like an answer that ended.
"""

import dataclasses
import functools
import ipaddress
import json
import os
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
import tiny_models
import tiny_tokenizers
from corpus_grammars import CHOICES, GBNF, LARK, REGEXES
from corpus_schemas import DIALECT_7, SCHEMAS
from helpers_arrivals import Answers, serve

from mlxserve.config import EngineConfig
from mlxserve.core.constraint import ConstrainedRow, Grammar, TokenMasks
from mlxserve.core.request import FinishReason, Request
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.build import build_engine
from mlxserve.engine.engine import Engine
from mlxserve.runner import device
from mlxserve.store import loader
from mlxserve.text import json_schema
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.token_constraint import GrammarConstraint, compute_masks
from mlxserve.text.tokenizer import Tokenizer

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
MAX_TOKENS = (10, 40, 100)
"""In turns: answers that are cut early, and such that come to an end."""
MAX_REST = 3000
"""Bytes that may be needed to finish an answer that was cut."""
CLOSING = b'"}])0-@:'
"""Bytes that bring an end nearer in most grammars."""

Check = Callable[[str], bool]
formats = jsonschema.FormatChecker(formats=())


def _format(name: str, pattern: str) -> None:
    formats.checks(name)(lambda value: not isinstance(value, str) or re.fullmatch(pattern, value, re.I) is not None)


_DATE, _TIME = r"\d{4}-\d\d-\d\d", r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_format("time", _TIME)
_format("date-time", f"{_DATE}t{_TIME}")
_format("duration", r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)")
_format("email", r"[^@\s]+@[^@\s]+|\"[^\"]*\"@.+")
_format("hostname", r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_format("uri", r"[a-z][a-z0-9+.-]*:[^\s<>\"{}|\\^`]*")
# The year 0 exists for RFC 3339, and not for Python.
formats.checks("date", ValueError)(lambda value: bool(date.fromisoformat(re.sub("^0000", "2000", value))))
formats.checks("ipv4", ValueError)(lambda value: bool(ipaddress.IPv4Address(value)))
formats.checks("ipv6", ValueError)(lambda value: bool(ipaddress.IPv6Address(value)))
formats.checks("uuid", ValueError)(lambda value: bool(uuid.UUID(value)))


def satisfies(schema: Any) -> Check:
    dialect = isinstance(schema, dict) and schema.get("$schema") == DIALECT_7
    validator = jsonschema.Draft7Validator if dialect else jsonschema.Draft202012Validator
    checker = validator(schema, format_checker=formats)

    def check(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        except ValueError:
            return False
        return checker.is_valid(value)

    return check


def corpus() -> Iterator[tuple[str, Grammar, Check]]:
    for name, schema in SCHEMAS.items():
        yield name, Grammar("json_schema", schema, "response_format"), satisfies(schema)
    for name, pattern in REGEXES.items():
        yield f"regex {name}", Grammar("regex", pattern, "regex"), functools.partial(_fullmatch, pattern)
    for name, (text, check) in (LARK | GBNF).items():
        yield name, Grammar("grammar", text, "grammar"), check
    for name, choices in CHOICES.items():
        yield f"choice {name}", Grammar("choice", choices, "choice"), frozenset(choices).__contains__


def _fullmatch(pattern: str, text: str) -> bool:
    # Its \w and \d are those of Unicode's regular expressions, as the grammar's are; Python's own \w has no marks.
    return regex.fullmatch(pattern, text) is not None


CORPUS = {name: (grammar, check) for name, grammar, check in corpus()}


@functools.cache
def byte_tokenizer() -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.single_bytes()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


@functools.cache
def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer())


@functools.cache
def byte_ids() -> dict[int, int]:
    """Token ids of the byte tokenizer, by byte."""
    tokenizer = byte_tokenizer()
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return {byte: ids[bytes([byte])] for byte in range(256)}


def finished(grammar: Grammar, beginning: bytes) -> bytes | None:
    """A text of the grammar that begins so; None if the beginning is none of any."""
    constraint = byte_compiler().compile(grammar)
    new = [byte_ids()[byte] for byte in beginning]
    if constraint.num_accepted(new) < len(new):
        return None
    text = bytearray(beginning)
    (eos,) = byte_tokenizer().eos_token_ids
    rng = random.Random(0)
    while len(text) < len(beginning) + MAX_REST:
        masks = compute_masks([ConstrainedRow(0, constraint, new)], 1)
        assert not masks.failures, f"{masks.failures} after {bytes(text)!r}"
        if is_allowed(masks, eos):
            return bytes(text)
        allowed = [byte for byte in range(256) if is_allowed(masks, byte_ids()[byte])]
        closing = [byte for byte in allowed if byte in CLOSING]
        text.append(rng.choice(closing if closing and rng.random() < 0.8 else allowed))
        new = [byte_ids()[text[-1]]]
    raise AssertionError(f"no end within {MAX_REST} bytes of {beginning!r}")


def is_allowed(masks: TokenMasks, token_id: int) -> bool:
    return bool(masks.bits[token_id // 8] >> token_id % 8 & 1)


def request(name: str, constraint: GrammarConstraint | None, tokenizer: Tokenizer, seed: int, **fields: Any) -> Request:
    prompt = fields.pop("prompt", tiny_models.prompt(5, seed=seed % 1000))
    max_tokens = MAX_TOKENS[seed % len(MAX_TOKENS)]
    made = tiny_models.make_request(name, prompt, max_tokens, SamplingParams(temperature=1.0, seed=seed))
    return dataclasses.replace(made, eos_token_ids=tokenizer.eos_token_ids, constraint=constraint, **fields)


def check_answers(names: Sequence[str], answers: Answers, tokenizer: Tokenizer) -> Counter[FinishReason]:
    reasons: Counter[FinishReason] = Counter()
    for name in names:
        grammar, check = CORPUS[name]
        reason, ids = answers.reasons[name], answers.ids(name)
        reasons[reason] += 1
        assert reason in (FinishReason.STOP, FinishReason.LENGTH), f"{name}: {reason}"
        text_ids = ids[:-1] if reason is FinishReason.STOP else ids
        assert not any(map(tokenizer.is_special, text_ids)), name
        text = b"".join(map(tokenizer.token_bytes, text_ids))
        if reason is FinishReason.LENGTH:
            whole = finished(grammar, text)
            assert whole is not None, f"{name}: {text!r} begins nothing valid"
            text = whole
        assert check(text.decode()), f"{name}: {text!r}"
    return reasons


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


def tiny_engine(**settings: Any) -> Engine:
    config = tiny_models.engine_config(**settings)
    return build_engine(tiny_models.loaded(tiny_models.build("llama")), config, device.detect(), 4096).engine


def test_the_corpus_covers_every_keyword_and_format() -> None:
    keywords: set[str] = set()
    formats: set[str] = set()
    waiting: list[Any] = list(SCHEMAS.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            keywords.update(value)
            formats.update(text for text in [value.get("format")] if isinstance(text, str))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    assert keywords >= json_schema.KEYWORDS | json_schema.ANNOTATIONS | {"$id"}
    assert formats == json_schema.FORMATS
    assert len(CORPUS) > 200


def test_answers_are_valid_or_the_beginning_of_something_valid() -> None:
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer)
    # As many prompts of the same seed as there are grammars; among them every eighth request is without any.
    requests = [
        request(name, compiler.compile(grammar), tokenizer, SEED + index)
        for index, (name, (grammar, _)) in enumerate(CORPUS.items())
    ]
    free = [request(f"free {index}", None, tokenizer, SEED + index) for index in range(0, len(requests), 8)]
    answers = serve(tiny_engine(max_num_seqs=32), [(0, each) for each in (*requests, *free)])
    reasons = check_answers([each.request_id for each in requests], answers, tokenizer)
    print(reasons)
    # Both kinds must be there to be tested.
    assert min(reasons[FinishReason.STOP], reasons[FinishReason.LENGTH]) > 10


@pytest.mark.slow
def test_a_sample_answered_by_the_demo_model(demo_model: Path) -> None:
    """Its tokenizer is built from a GGUF file, and it would rather say other things."""
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    loaded = loader.load(demo_model, name="demo", dtype_policy="float32")
    tokenizer = Tokenizer(loaded.tokenizer, loaded.eos_token_ids)
    compiler = GrammarCompiler(tokenizer)
    config = EngineConfig(max_num_seqs=32, kv_cache_bytes=400_000_000)
    engine = build_engine(loaded, config, device.detect(), loaded.context_length).engine
    prompt = tokenizer.encode("Tell me about yourself, in the form I asked for:\n", add_special_tokens=True)
    names = random.Random(SEED).sample(list(CORPUS), 24)
    requests = [
        request(name, compiler.compile(CORPUS[name][0]), tokenizer, SEED + index, prompt=prompt)
        for index, name in enumerate(names)
    ]
    answers = serve(engine, [(0, each) for each in requests])
    assert sum(check_answers(names, answers, tokenizer).values()) == len(names)
