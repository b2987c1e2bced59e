"""Tools on their way in: which format a model has, what requests may offer, history, and engines made to call."""

import dataclasses
import itertools
import json
from typing import Any

import helpers_engine
import jsonschema
import pytest
import tiny_models
import tiny_tokenizers
from helpers_arrivals import serve
from helpers_engine import on_loop
from helpers_served import serving
from test_tool_calls import calls_of, parse_pieces
from tokenizers import AddedToken
from tool_call_cases import BOOLEAN, TOOLS, schema, tool

from mlxserve.core.constraint import Grammar
from mlxserve.core.generation import ChatPrompt, GenerationRequest, ToolChoice
from mlxserve.core.request import FinishReason
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.build import build_engine
from mlxserve.errors import InvalidParameter
from mlxserve.runner import device
from mlxserve.text.capabilities import capabilities
from mlxserve.text.chat_template import render
from mlxserve.text.grammar import GrammarCompiler
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_calls import checked_tools, complete_tool_messages, find_tool_format
from mlxserve.text.tool_calls import families as known
from mlxserve.text.tool_calls.families import find_family
from mlxserve.text.tool_calls.family import Family

USER = {"role": "user", "content": "the cat"}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TOOL_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}{{ (tools or []) | length }}<tool_call>"


def tokenizer_with(template: Any, *tokens: str) -> Tokenizer:
    hf_tokenizer = tiny_tokenizers.byte_level()
    hf_tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=True) for token in tokens], special_tokens=True
    )
    hf_tokenizer.chat_template = template
    return Tokenizer(hf_tokenizer, frozenset({hf_tokenizer.eos_token_id}))


# --- which format ---


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<tool_call>\n{{ tool_call.name }}", known.HERMES),
        ("<tool_call>\\n<function=example>", known.QWEN3_CODER),
        ("<tool_call>{{ name }}\n<arg_key>k</arg_key>\n<arg_value>", known.GLM),
        ("<tool_call>{{ name }}<arg_key>k</arg_key><arg_value>", known.GLM47),
        ("<longcat_tool_call><longcat_arg_key>", known.LONGCAT),
        ("[TOOL_CALLS] [{{ call }}]", known.MISTRAL_LIST),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", known.MISTRAL),
        ("<|python_tag|> Environment: ipython", known.LLAMA3),
        ("<|python_start|>", known.LLAMA4),
        ("<|tool_call>call:f<tool_call|>", known.GEMMA4),
        ("<start_function_call>", known.FUNCTION_GEMMA),
        ("<|tool_calls_section_begin|>", known.KIMI_K2),
        ("<minimax:tool_call>", known.MINIMAX_M2),
        ('<function name="f"><param name="p">', known.MINICPM5),
        ("<atem:function_calls>", known.MUSE_SPARK),
        ("<|tool_list_start|>", known.LFM2),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c> ```json", known.DEEPSEEK_V3),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", known.DEEPSEEK_V31),
        ("<|START_ACTION|>", known.COMMAND_R),
        ("<TOOLCALL>", known.NEMOTRON),
        ("<|tool_call|>", known.GRANITE3),
        ("<|tool_call|><|/tool_call|>", known.PHI4),
        ("nothing known", known.GENERIC),
    ],
)
def test_the_format_is_told_from_the_template(template: str, family: Family) -> None:
    assert find_family("{% if tools %}" + template, lambda token: False) is family
    assert find_family(template, lambda token: False) is None


def test_the_format_is_told_from_the_vocabulary_where_the_template_does_not_say() -> None:
    lfm2 = {"<|tool_call_start|>", "<|tool_call_end|>"}
    assert find_family("{{ tools }}", lfm2.__contains__) is known.LFM2
    xtml = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
    assert find_family("{{ messages }}", xtml.__contains__) is known.KIMI_K3
    assert find_family(None, xtml.__contains__) is None
    assert find_family("{{ messages }}", HARMONY.__contains__) is known.HARMONY


def test_markers_that_are_control_tokens_are_known() -> None:
    found = find_tool_format(tokenizer_with("{{ tools }}[TOOL_CALLS][ARGS]", "[TOOL_CALLS]"))
    assert found is not None
    assert (found.name, list(found.control_tokens)) == ("mistral", ["[TOOL_CALLS]"])
    assert set(found.markers) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}


def test_a_template_for_tools_is_looked_at_where_there_is_one() -> None:
    tokenizer = tokenizer_with({"default": "{{ messages }}", "tool_use": "{{ tools }}<tool_call>"})
    assert tokenizer.tool_template == "{{ tools }}<tool_call>"
    found = find_tool_format(tokenizer)
    assert found is not None
    assert found.name == "hermes"
    assert find_tool_format(tokenizer_with("{{ messages }}")) is None


@pytest.mark.parametrize(
    ("template", "tokens", "found"),
    [
        (None, (), ("completion",)),
        ("{{ messages }}", (), ("completion",)),
        ("{{ tools }}{{ enable_thinking }}", (), ("completion", "tools", "thinking")),
        ("{{ messages }}", HARMONY, ("completion", "tools", "thinking")),
        (None, HARMONY, ("completion",)),
        ("{{ messages }}", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("completion", "insert")),
        ("{{ messages }}", ("<|fim_prefix|>", "<|fim_suffix|>"), ("completion",)),
    ],
)
def test_capabilities(template: str | None, tokens: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert capabilities(template, tokens.__contains__) == found


# --- what may be offered ---


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        (["f"], "tools[0]", "an object"),
        ([{"type": "web_search"}], "tools[0]", "type 'function'"),
        ([TOOLS[0], {"type": "function"}], "tools[1]", "a 'function'"),
        ([tool("")], "tools[0].function.name", "1 to 260"),
        ([tool("a b")], "tools[0].function.name", "1 to 260"),
        ([tool("a" * 261)], "tools[0].function.name", "1 to 260"),
        ([{"function": {"name": 3}}], "tools[0].function.name", "1 to 260"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name", "two tools of the name 'f'"),
        ([tool("f", {"type": "string"})], "tools[0].function.parameters", "type 'object'"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters", "type 'object'"),
        ([tool("f", {"properties": {"a": {"type": "text"}}})], "tools[0].function.parameters", "(at #/properties/a)"),
        ([tool("f", {"properties": {"a": 3}})], "tools[0].function.parameters", "an object or a boolean"),
        ([tool("f", {"properties": []})], "tools[0].function.parameters", "'properties' must be an object"),
        ([tool("f", {"required": "a"})], "tools[0].function.parameters", "'required' must be a list"),
        ([tool(f"f{i}") for i in range(1001)], "tools", "1001 tools; 1000"),
    ],
)
def test_tools_that_are_none_are_refused(tools: list[Any], param: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        checked_tools(tools)
    assert message in str(caught.value)
    assert caught.value.param == param


def test_a_schema_of_any_depth_is_checked_or_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidParameter, match="levels"):
        checked_tools([tool("f", deep)])


def test_tools_that_models_are_only_shown_may_have_what_cannot_be_enforced() -> None:
    parameters = {"properties": {"a": {"not": {}, "format": "color", "multipleOf": 1e-9}}, "x-order": [1]}
    assert list(checked_tools([tool("f", parameters), tool("g.h-i_2:j/k"), {"function": {"name": "j"}}])) == [
        "f",
        "g.h-i_2:j/k",
        "j",
    ]


# --- history ---


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def test_results_get_the_names_of_their_tools() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [call("a", "clock"), call("b", "search")]}
    results = [{"role": "tool", "content": "1", "tool_call_id": key} for key in "ba"]
    named = {"role": "tool", "content": "2", "tool_call_id": "a", "name": "mine"}
    free = {"role": "tool", "content": "3", "name": "clock"}
    messages = (USER, calls, *results, named, free)
    completed = complete_tool_messages(messages)
    assert [message.get("name") for message in completed[2:]] == ["search", "clock", "mine", "clock"]
    assert "name" not in results[0]
    assert render(tokenizer_with(TOOL_TEMPLATE), ChatPrompt(messages[:3])) == "the cat1search0<tool_call>"


def test_a_result_for_an_unknown_call_is_refused() -> None:
    messages = (USER, {"role": "assistant", "tool_calls": [call("a", "f")]}, {"role": "tool", "tool_call_id": "b"})
    with pytest.raises(InvalidParameter, match="no message before it has a tool call with the id 'b'") as caught:
        render(tokenizer_with(TOOL_TEMPLATE), ChatPrompt(messages))
    assert caught.value.param == "messages[2].tool_call_id"


def test_templates_that_want_ids_of_nine_characters_get_them() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("call_1", "f"), call("abcdefgh9", "g")]},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "tool", "tool_call_id": "abcdefgh9"},
    ]
    completed = complete_tool_messages(messages, has_short_ids=True)
    first, second = (each["id"] for each in completed[0]["tool_calls"])
    assert (completed[1]["tool_call_id"], completed[2]["tool_call_id"]) == (first, second)
    assert len(first) == 9
    assert first.isalnum()
    assert second == "abcdefgh9"


def test_a_tool_choice_of_none_shows_no_tools() -> None:
    tokenizer = tokenizer_with("{{ tools is none }}")
    assert render(tokenizer, ChatPrompt((USER,), tuple(TOOLS))) == "False"
    assert render(tokenizer, ChatPrompt((USER,), tuple(TOOLS), tool_choice=ToolChoice("none"))) == "True"


# --- requests ---


@pytest.mark.parametrize(
    ("template", "choice", "tools", "grammar", "param", "message"),
    [
        ("{{ messages }}", ToolChoice(), TOOLS, None, "tools", "fake does not support tools"),
        ("{{ messages }}", ToolChoice("none"), [tool("a b")], None, "tools[0].function.name", "1 to 260"),
        ("{{ messages }}", ToolChoice("required"), [], None, "tool_choice", "there are no tools"),
        (TOOL_TEMPLATE, ToolChoice("required"), [], None, "tool_choice", "there are no tools"),
        (TOOL_TEMPLATE, ToolChoice("required", "f"), TOOLS, None, "tool_choice", "no tool has the name 'f'"),
        (TOOL_TEMPLATE, ToolChoice("required"), TOOLS, Grammar("regex", "a", "regex"), "tool_choice", "one of them"),
        (None, ToolChoice(), TOOLS, None, "tools", "does not support tools"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    choice: ToolChoice,
    tools: list[Any],
    grammar: Any,
    param: str,
    message: str,
) -> None:
    tokenizer = tokenizer_with(template)
    monkeypatch.setattr(helpers_engine, "tokenizer", lambda: tokenizer)

    @on_loop
    async def refused() -> None:
        async with serving() as served:
            prompt = ChatPrompt((USER,), tuple(tools), tool_choice=choice)
            with pytest.raises(InvalidParameter, match=message) as caught:
                await served.model.generate(
                    GenerationRequest("r", prompt, SamplingParams(max_tokens=2), grammar=grammar)
                )
            assert caught.value.param == param

    refused()


def test_tools_reach_the_template_and_a_grammar_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with(TOOL_TEMPLATE)
    monkeypatch.setattr(helpers_engine, "tokenizer", lambda: tokenizer)

    @on_loop
    async def answered() -> None:
        async with serving() as served:
            for number, mode in enumerate(("none", "auto", "required")):
                prompt = ChatPrompt((USER,), tuple(TOOLS), tool_choice=ToolChoice(mode))
                request = GenerationRequest(f"{number}", prompt, SamplingParams(max_tokens=2))
                for generation in await served.model.generate_samples(request, 2):
                    sent = generation.trace.request
                    assert sent is not None
                    text = tokenizer.hf_tokenizer.decode(sent.prompt_token_ids)
                    assert text == f"the cat{0 if mode == 'none' else 4}<tool_call>"
                    assert (sent.constraint is not None) == (mode == "required")
                    generation.cancel()

    answered()


DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
BOUNDED = [
    tool("paint", schema(["colour", "coats"], colour={"enum": ["red", "dark blue"]}, coats=DIGIT, dry=BOOLEAN)),
    tool("stop"),
]


@pytest.mark.parametrize(
    "template",
    ["<tool_call>", "<tool_call>\n<function=", "[TOOL_CALLS][ARGS]", "<|tool_call_start|>", "<|tool_call><tool_call|>"],
)
def test_an_engine_made_to_call_calls_whatever_its_weights(template: str) -> None:
    found = find_family("{{ tools }}" + template, lambda token: False)
    assert found is not None
    tokenizer = tokenizer_with("{{ tools }}" + template, *found.all_markers)
    form = find_tool_format(tokenizer)
    assert form is not None
    assert form.control_tokens.keys() == set(found.all_markers)
    compiler = GrammarCompiler(tokenizer)
    choices = [ToolChoice("required", parallel=False), ToolChoice("required", name="paint", parallel=False)]
    model = tiny_models.loaded(tiny_models.build("llama", seed=3))
    engine = build_engine(model, tiny_models.engine_config(), device.detect(), tiny_models.CONTEXT_LENGTH).engine
    requests = []
    for number, (choice, seed) in enumerate(itertools.product(choices, range(3))):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        request = tiny_models.make_request(f"{number}", tiny_models.prompt(5, seed=seed), 400, sampling)
        constraint = compiler.compile(form.grammar(BOUNDED, choice))
        requests.append(dataclasses.replace(request, eos_token_ids=tokenizer.eos_token_ids, constraint=constraint))
    answers = serve(engine, [(0, request) for request in requests])
    schemas = {each["function"]["name"]: each["function"]["parameters"] or {} for each in BOUNDED}
    for request in requests:
        assert answers.reasons[request.request_id] is FinishReason.STOP
        ids = [token_id for token_id in answers.ids(request.request_id) if token_id not in tokenizer.eos_token_ids]
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        ((name, arguments),) = calls_of(parse_pieces(found, [text], BOUNDED))
        jsonschema.validate(arguments, schemas[name])
        assert name == "paint" or int(request.request_id) < 3, json.dumps(arguments)
