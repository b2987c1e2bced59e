"""Tokens to deltas: thoughts, content and calls with the tokens that wrote them, stop strings, whatever the cut."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers_chat_models import FINAL, SAID, model, token_ids
from helpers_engine import ScriptedRunner, on_loop
from helpers_served import serving

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import (
    ChatPrompt,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    Reasoning,
    ReasoningDelta,
    TextDelta,
    TextPrompt,
    ToolCallDelta,
    ToolChoice,
)
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.step import SampledToken
from mlxserve.engine.answer_text import AnswerText
from mlxserve.text.detokenizer import IncrementalDetokenizer
from mlxserve.text.reasoning import THINK, ReasoningParser, Stage

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def answer(
    name: str, script: Sequence[int], prompt: Prompt | None = None, **fields: Any
) -> list[GenerationEvent]:
    """The events of an answer of these tokens."""
    (eos,) = model(name).eos_token_ids
    sampling = SamplingParams(temperature=0.0, max_tokens=fields.pop("max_tokens", None), **fields.pop("sampling", {}))
    request = GenerationRequest("r", prompt or ChatPrompt(SAID), sampling, **fields)
    async with serving(ScriptedRunner(script, eos), model_tokenizer=model(name)) as served:
        generation = await served.model.generate(request)
        events = [event async for event in generation]
        await served.idle()
    return events


def parts(events: list[GenerationEvent]) -> list[tuple[str, str]]:
    """Texts with their kinds; of calls the name and the arguments."""
    result: list[tuple[str, str]] = []
    for event in events:
        match event:
            case TextDelta(text):
                kind = "content"
            case ReasoningDelta(text):
                kind = "thoughts"
            case ToolCallDelta(index, _, name, text):
                kind = f"call {index}"
                if name is not None:
                    result.append((f"{kind} name", name))
            case _:
                continue
        if result and result[-1][0] == kind:
            text = result.pop()[1] + text
        if text:
            result.append((kind, text))
    return result


def finished(events: list[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def tokens_of(name: str, events: list[GenerationEvent], kind: type[Any]) -> str:
    """The text of the tokens that came with a kind of delta."""
    ids = [token.token_id for event in events if isinstance(event, kind) for token in event.tokens]
    return b"".join(map(model(name).token_bytes, ids)).decode()


CASES = [
    ("qwen", "<think>\nSo: größer 的 🎉.\n</think>\n\nIt is <b>3</b> 🎊.", "So: größer 的 🎉.", "It is <b>3</b> 🎊."),
    ("qwen", "<think>\n\n</think>\n\nIt is.", "", "It is."),
    ("qwen", "It is <think>.", "", "It is <think>."),
    ("r1", "Hm.\n</think>\n\nIt is.", "Hm.", "It is."),
    ("r1", "<think>\nHm.\n</think>\n\nIt is.", "Hm.", "It is."),
    ("r1", "Hm, cut o", "Hm, cut o", ""),
    ("magistral", "[THINK]Hm.[/THINK]It is.", "Hm.", "It is."),
    ("granite", "Here is my thought process: Hm.\n\nHere is my response: It is.", "Hm.", "It is."),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}It is.", "Hm.", "It is."),
    ("plain", "<think>It is.</think>", "It is.", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "thoughts", "content"), CASES)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@on_loop
async def test_thoughts_and_content(name: str, text: str, thoughts: str, content: str, seed: int | None) -> None:
    script = token_ids(name, text, rng=None if seed is None else random.Random(seed))
    events = await answer(name, script)
    expected = [("thoughts", thoughts), ("content", content)]
    assert parts(events) == [part for part in expected if part[1]]
    usage = finished(events).usage
    assert usage.num_generated_tokens == len(script) + 1
    if seed is None:
        # Content has its own tokens and no marker's; thoughts have their markers'.
        written = tokens_of(name, events, TextDelta)
        assert written.strip() == content
        assert tokens_of(name, events, ReasoningDelta) == (text[: text.rfind(written)] if thoughts else "")
    reasoning = [token for event in events if isinstance(event, ReasoningDelta) for token in event.tokens]
    assert usage.num_reasoning_tokens == len(reasoning)


@on_loop
async def test_raw_text_stays_raw() -> None:
    text = "<think>Hm.</think>It is."
    events = await answer("qwen", token_ids("qwen", text), TextPrompt("hi"))
    assert parts(events) == [("content", text)]


def test_a_delta_comes_as_soon_as_it_is_certain() -> None:
    ids = token_ids("qwen", "<think>\nh\nm</think>\n\na<b")
    text = AnswerText(IncrementalDetokenizer(model("qwen")), (), ReasoningParser(THINK, Stage.START))
    given = []
    for token_id in ids:
        text.add(SampledToken(token_id), is_free=False)
        given.append([(type(delta), delta.text) for delta in text.take()])
    texts = [model("qwen").token_bytes(token_id) for token_id in ids]
    assert texts == [b"<think>", b"\n", b"h", b"\n", b"m", b"</think>", b"\n", b"\n", b"a", b"<", b"b"]
    thought, content = ReasoningDelta, TextDelta
    assert given == [
        *([], [], [(thought, "h")], [], [(thought, "\nm")], [], [], []),
        # The marker's tokens come with the thoughts, when it is clear that no space follows.
        *([(thought, ""), (content, "a")], [(content, "<")], [(content, "b")]),
    ]


# --- calls ---


CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "größer"}'


@pytest.mark.parametrize("seed", [None, 1, 2])
@on_loop
async def test_a_call_of_gpt_oss_ends_with_its_token(seed: int | None) -> None:
    """<|call|> is no end-of-sequence token of this tokenizer's file."""
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}"
    rng = None if seed is None else random.Random(seed)
    script = [*token_ids("harmony", text, rng=rng), *token_ids("harmony", "<|call|>and more")]
    events = await answer("harmony", script, ChatPrompt(SAID, tools=(TOOL,)))
    assert parts(events) == [("thoughts", "Hm."), ("call 0 name", "f"), ("call 0", '{"a": "größer"}')]
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [call.name for call in calls] == ["f"] + [None] * (len(calls) - 1)
    (call_id,) = {call.call_id for call in calls}
    assert call_id.startswith("call_")
    assert finished(events).num_tool_calls == 1
    assert finished(events).reason is FinishReason.STOP
    assert len([event for event in events if isinstance(event, TextDelta)]) == 0
    assert "functions.f" in tokens_of("harmony", events, ToolCallDelta)


@on_loop
async def test_two_calls_have_ids_and_indices_of_their_own() -> None:
    script = token_ids("harmony", f"{CALL}<|end|><|start|>assistant{CALL}")
    events = await answer("harmony", script, ChatPrompt(SAID, tools=(TOOL,)))
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert len({(call.index, call.call_id) for call in calls}) == 2
    assert finished(events).num_tool_calls == 2
    assert [kind for kind, _ in parts(events)] == ["call 0 name", "call 0", "call 1 name", "call 1"]


@on_loop
async def test_a_call_that_nobody_offered_is_content() -> None:
    events = await answer("harmony", token_ids("harmony", CALL))
    assert parts(events) == [("content", '{"a": "größer"}')]
    assert finished(events).num_tool_calls == 0


# --- how answers end ---


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@on_loop
async def test_stop_strings_end_the_content_and_not_the_thoughts(seed: int | None) -> None:
    text = "<think>a STOP b</think>c STO d STOP e"
    script = token_ids("qwen", text, rng=None if seed is None else random.Random(seed))
    events = await answer("qwen", script, stop=("STOP",))
    assert parts(events) == [("thoughts", "a STOP b"), ("content", "c STO d ")]
    assert finished(events).stop_string == "STOP"
    assert finished(events).reason is FinishReason.STOP


@on_loop
async def test_a_stop_string_does_not_reach_over_a_call() -> None:
    first = "<|channel|>commentary<|message|>see ST<|end|><|start|>assistant"
    script = token_ids("harmony", f"{first}{CALL}<|end|>{FINAL}OP")
    events = await answer("harmony", script, ChatPrompt(SAID, tools=(TOOL,)), stop=("STOP",))
    assert [kind for kind, _ in parts(events)] == ["content", "call 0 name", "call 0", "content"]
    assert "".join(text for kind, text in parts(events) if kind == "content") == "see STOP"
    assert finished(events).stop_string is None


@on_loop
async def test_no_stop_string_before_min_tokens() -> None:
    script = token_ids("qwen", "<think>a</think>b STOP c STOP d", rng=random.Random(1))
    sampling = {"min_tokens": len(token_ids("qwen", "<think>a</think>b STOP c", rng=random.Random(1)))}
    events = await answer("qwen", script, stop=("STOP",), sampling=sampling)
    assert finished(events).stop_string == "STOP"
    assert parts(events)[1][1].startswith("b STOP c")


@pytest.mark.parametrize("name", ["qwen", "magistral", "harmony"])
@on_loop
async def test_what_is_held_back_comes_at_the_end(name: str) -> None:
    """However many tokens there may be, no marker leaks, and what comes is a beginning of the whole."""
    text = next(text for model_name, text, *_ in CASES if model_name == name)
    script = token_ids(name, text)
    whole = dict(parts(await answer(name, script)))
    for max_tokens in range(1, len(script) + 1):
        events = await answer(name, script, max_tokens=max_tokens)
        for kind, part in parts(events):
            assert whole[kind].startswith(part)
        assert finished(events).reason is FinishReason.LENGTH


@pytest.mark.parametrize("begun", ["größ", "的", "🎉"])
@on_loop
async def test_half_a_character_at_the_end_is_only_left_out_where_a_limit_cut_it(begun: str) -> None:
    for name, before, kind in (
        ("plain", "", "content"),
        ("r1", "", "thoughts"),
        ("harmony", CALL.partition('"größer')[0] + '"', "call 0"),
    ):
        prompt = ChatPrompt(SAID, tools=(TOOL,) if name == "harmony" else ())
        by_byte = {model(name).token_bytes(token_id): token_id for token_id in range(model(name).vocab_size)}
        script = [*token_ids(name, before), *(by_byte[bytes([byte])] for byte in begun.encode()[:-1])]
        cut = parts(await answer(name, script, prompt, max_tokens=len(script)))
        ended = parts(await answer(name, script, prompt))
        assert "\ufffd" not in dict(cut).get(kind, "")
        assert dict(ended)[kind] == dict(cut).get(kind, "") + "\ufffd"


CALLS = {
    "qwen-tools": '<tool_call>\n{"name": "f", "arguments": {"a": "größer"}}\n</tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "größer"}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": CALL,
}


@pytest.mark.parametrize("name", CALLS)
@on_loop
async def test_the_head_of_a_call_that_had_to_come_is_no_content(name: str) -> None:
    """Wherever a limit cuts it; where the model was free to call, the markup is what it said."""
    seen: dict[str, set[str]] = {"auto": set(), "required": set()}
    script = token_ids(name, CALLS[name])
    for choice in (ToolChoice(), ToolChoice("required")):
        prompt = ChatPrompt(SAID, tools=(TOOL,), tool_choice=choice, reasoning=Reasoning(enabled=False))
        for max_tokens in range(1, len(script) + 1):
            events = await answer(name, script, prompt, max_tokens=max_tokens)
            seen[choice.mode] |= {kind for kind, _ in parts(events)}
    assert seen["required"] == {"call 0 name", "call 0"}
    assert ("content" in seen["auto"]) == (name != "harmony")


# --- thinking on and off ---


@on_loop
async def test_switched_off_all_is_content() -> None:
    for name, reasoning in [("qwen", Reasoning(enabled=False)), ("r1", Reasoning(effort="none"))]:
        events = await answer(name, token_ids(name, "It is."), ChatPrompt(SAID, reasoning=reasoning))
        assert parts(events) == [("content", "It is.")]
        assert finished(events).usage.num_reasoning_tokens == 0


# --- grammars ---

YES = Grammar("choice", ["yes", "no"], "guided_choice")


@pytest.mark.parametrize(
    ("name", "text", "thoughts"),
    [
        ("qwen", "<think>\nHm: no?\n</think>", "Hm: no?"),
        ("qwen", "", ""),
        ("r1", "Hm.</think>", "Hm."),
        ("magistral", "[THINK]Hm.[/THINK]", "Hm."),
        ("granite", "Here is my thought process: Hm.\nHere is my response:", "Hm."),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|>" + FINAL, "Hm."),
        ("harmony", "<|channel|>final <|constrain|>json<|message|>", ""),
        ("plain", "", ""),
    ],
)
@pytest.mark.parametrize("wanted", ["yes", "maybe"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
@on_loop
async def test_a_grammar_begins_after_the_thoughts(
    name: str, text: str, thoughts: str, wanted: str, max_num_seqs: int
) -> None:
    (eos,) = model(name).eos_token_ids
    opening = token_ids(name, text)
    runner = ScriptedRunner([*opening, *token_ids(name, wanted)], eos)
    async with serving(runner, model_tokenizer=model(name), max_num_seqs=max_num_seqs) as served:
        sampling = SamplingParams(temperature=0.0)
        made = await served.model.generate_samples(
            GenerationRequest("r", ChatPrompt(SAID), sampling, grammar=YES), max_num_seqs
        )
        for generation in made:
            found = dict(parts([event async for event in generation]))
            assert found.get("thoughts", "") == thoughts
            assert found["content"] == "yes" if wanted == "yes" else found["content"] in ("yes", "no")
    assert (runner.num_refused > 0) == (wanted == "maybe")


@on_loop
async def test_thoughts_may_not_end_an_answer_that_has_a_grammar() -> None:
    script = token_ids("qwen", "<think>Hm")
    events = await answer("qwen", script, max_tokens=len(script) + 5, grammar=YES)
    assert finished(events).reason is FinishReason.LENGTH


@on_loop
async def test_a_schema_after_thoughts_gives_json() -> None:
    schema = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"], "additionalProperties": False}
    script = token_ids("qwen", '<think>{"n": 4}</think>\n\n{"n":3}')
    events = await answer("qwen", script, grammar=Grammar("json_schema", schema, "response_format"), max_tokens=100)
    assert parts(events)[0] == ("thoughts", '{"n": 4}')
    assert json.loads(parts(events)[1][1]) == {"n": 3}
