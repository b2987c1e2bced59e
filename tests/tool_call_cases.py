"""Tools, calls of them, and how each family of models writes these."""

import json
from collections.abc import Callable
from typing import Any

from mlxserve.text.tool_calls import families
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.json_calls import NamedCalls, ObjectCalls
from mlxserve.text.tool_calls.mistral import MistralCalls
from mlxserve.text.tool_calls.tagged import TaggedCalls

Call = tuple[str, dict[str, Any]]


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SEARCH = schema(
    ["query"],
    query=STRING,
    exact=BOOLEAN,
    tags={"type": "array", "items": STRING},
    options=schema(["depth"], depth=INTEGER, near=schema([], name=STRING)),
)
TOOLS = [
    tool("get_weather", schema(["city"], city=STRING, days=INTEGER)),
    tool("write_file", schema(["path", "content"], path=STRING, content=STRING)),
    tool("search", SEARCH),
    tool("clock"),
]
WEATHER: Call = ("get_weather", {"city": "Zürich 🎉", "days": 3})
FILE: Call = ("write_file", {"path": "a/b.py", "content": 'def f():\n    print("{]<x>\\n")\n\n'})
SEARCH_CALL: Call = (
    "search",
    {"query": "true", "exact": True, "tags": ["a", "b, c"], "options": {"depth": 2, "near": {"name": "x}"}}},
)
CLOCK: Call = ("clock", {})
CALLS: list[list[Call]] = [[WEATHER], [FILE], [SEARCH_CALL], [WEATHER, FILE], [SEARCH_CALL, WEATHER, SEARCH_CALL]]


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object_call(family: ObjectCalls, name: str, arguments: dict[str, Any]) -> str:
    call = {family.name_key: name, family.arguments_key: arguments}
    return family.prefix + json.dumps(call, ensure_ascii=False) + family.suffix


def _named_call(family: NamedCalls, name: str, arguments: dict[str, Any]) -> str:
    prefix = (family.prefixes or family.starts)[0] + (f"functions.{name}:0" if family.is_indexed else name)
    return prefix + family.between[0] + json.dumps(arguments, ensure_ascii=False) + family.suffix


def _mistral_call(family: MistralCalls, name: str, arguments: dict[str, Any]) -> str:
    if family.in_list:
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def _tagged_call(family: TaggedCalls, name: str, arguments: dict[str, Any]) -> str:
    between = family.between
    text = family.prefix + family.call_start + name + family.name_end
    for key, value in arguments.items():
        text += between + family.argument_start + key + family.argument_end
        text += (between + family.value_start if family.value_start else "") + family.margin
        text += _bare(value) + family.margin + family.value_end
    return text + between + family.call_end + family.suffix


def _kimi_k3_call(family: Family, name: str, arguments: dict[str, Any]) -> str:
    kinds = {str: "string", int: "number", bool: "boolean", list: "array", dict: "object"}
    text = f'<|open|>call tool="{name}" index="1"<|sep|>'
    for key, value in arguments.items():
        text += f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
        text += f"{_bare(value)}<|close|>argument<|sep|>"
    return text + "<|close|>call<|sep|>"


def _pythonic_call(family: Family, name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma_call(family: Any, name: str, arguments: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return family.quote + value + family.quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(part)}" for key, part in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json.dumps(value)

    return f"{family.starts[0]}call:{name}{written(arguments)}{family.ends[0]}"


_WRITERS: dict[str, Callable[[Any, str, dict[str, Any]], str]] = {
    "ObjectCalls": _object_call,
    "NamedCalls": _named_call,
    "MistralCalls": _mistral_call,
    "TaggedCalls": _tagged_call,
    "KimiK3Calls": _kimi_k3_call,
    "PythonicCalls": _pythonic_call,
    "GemmaCalls": _gemma_call,
}
ALL = [*(family for family, _ in families.FAMILIES), families.KIMI_K3, families.GENERIC]


def write(family: Family, calls: list[Call]) -> str:
    """The calls as the family's chat template puts them."""
    writer = _WRITERS[type(family).__name__]
    return family.opening + family.separator.join(writer(family, *call) for call in calls) + family.closing


Part = str | tuple[str, str]
"""Content, or a call's name and the text of its arguments."""
HERMES, GENERIC, QWEN, GLM = families.HERMES, families.GENERIC, families.QWEN3_CODER, families.GLM
ONE: list[Part] = [("clock", "{}")]
TWO: list[Part] = [*ONE, *ONE]


def hermes(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


def weather(arguments: str) -> list[Part]:
    return [("get_weather", arguments)]


def _hermes_weather(arguments: str) -> str:
    return hermes('{"name": "get_weather", "arguments": ' + arguments + "}")


def _kimi_k2(call: str) -> str:
    return f"<|tool_calls_section_begin|> <|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def _kimi_k3(call: str) -> str:
    return f"<|open|>tools<|sep|><|open|>{call}<|close|>call<|sep|><|close|>tools<|sep|>"


CASES: list[tuple[Family, str, list[Part]]] = [
    # JSON: the arguments' own text, in any order, with what else models put beside them.
    (HERMES, hermes('{"name":"clock"}'), ONE),
    (HERMES, hermes('{"name": "clock", "arguments": null}'), ONE),
    (HERMES, hermes('{"arguments": {"city":"a"} , "name": "get_weather"}'), weather('{"city":"a"}')),
    (HERMES, '<tool_call>{"id": "1", "type": "function", "name": "clock", "parameters": {}}', ONE),
    (HERMES, _hermes_weather('"{\\"city\\": \\"a\\"}"'), weather('{"city": "a"}')),
    (HERMES, _hermes_weather('{"city": "\\u00e9\\ud83c\\udf89"}'), weather('{"city": "\\u00e9\\ud83c\\udf89"}')),
    (HERMES, _hermes_weather('{"city": "</tool_call>"}'), weather('{"city": "</tool_call>"}')),
    (HERMES, _hermes_weather('{"city": "a\nb\t"}'), weather('{"city": "a\\nb\\t"}')),
    (HERMES, hermes('[{"name": "clock"}, {"name": "clock", "arguments": {}}]'), TWO),
    (HERMES, '<tool_call>\n<tool_call>\n{"name": "clock"}\n</tool_call>', ["<tool_call>", *ONE]),
    *(
        (HERMES, hermes(call), [hermes(call)])
        for call in (
            '{"name": "clock", "thoughts": "x"}',
            '{"name": 3, "arguments": {}}',
            '{"name": "clock", "arguments": [1]}',
            '{"arguments": {}}',
            "{}",
            '{"name": "clo',
        )
    ),
    (HERMES, hermes('{"name": "clock", "arguments": {"a": }}') + " x", [("clock", '{"a": '), "}}</tool_call> x"]),
    (HERMES, '<tool_call>{"name": "clock", "arguments": {"a": True}}', [("clock", '{"a": '), "True}}"]),
    # Bare JSON where a line begins, and nowhere else.
    (families.LLAMA3, '{"name": "clock", "parameters": {}}', ONE),
    (families.LLAMA3, '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock"}', TWO),
    (families.LLAMA3, 'x {"name": "clock", "parameters": {}}', ['x {"name": "clock", "parameters": {}}']),
    (GENERIC, 'Yes.\n  {"name": "clock", "arguments": {}}\nDone.', ["Yes.", *ONE, "Done."]),
    # A name before the arguments.
    (families.MISTRAL, "[TOOL_CALLS]clock[CALL_ID]a1B2[ARGS]{}[TOOL_CALLS]clock[ARGS]{}", TWO),
    (families.MISTRAL, '[TOOL_CALLS] [{"name": "clock", "arguments": {}, "id": "abcdefghi"}]', ONE),
    (families.MISTRAL_LIST, "[TOOL_CALLS]clock[ARGS]{}clock[ARGS]{}", TWO),
    (families.KIMI_K2, _kimi_k2("clock:0<|tool_call_argument_begin|> {} "), ONE),
    (
        families.DEEPSEEK_V31,
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>clock<\uff5ctool\u2581sep\uff5c>{}",
        ONE,
    ),
    # Bare text: of the schema's type.
    (
        QWEN,
        "<function=get_weather>\n<parameter=city>\n 12\n\n</parameter></function>",
        weather('{"city": " 12\\n"}'),
    ),
    (
        QWEN,
        hermes(
            "<function=get_weather><parameter=city>a</parameter><parameter=days>two</parameter></function>",
        ),
        weather('{"city": "a", "days": "two"}'),
    ),
    (
        QWEN,
        "<function=search>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=other>\n[1]\n</parameter>\n</function>",
        [("search", '{"exact": true, "other": [1]}')],
    ),
    (
        QWEN,
        '<function=search><parameter=tags>["a</parameter>", "b"]</parameter></function>',
        [("search", '{"tags": ["a</parameter>", "b"]}')],
    ),
    (QWEN, "<function=clock>\nnonsense</function>", [*ONE, "nonsense</function>"]),
    (QWEN, "<tool_call>\n<function=get weather>", ["<tool_call>\n<function=get weather>"]),
    (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", weather('{"city": "Par')),
    (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=days>\n1", weather('{"days": 1')),
    (GLM, hermes("clock"), ONE),
    (
        GLM,
        hermes("\nget_weather\n<arg_key>days</arg_key>\n<arg_value>3.0</arg_value>\n"),
        weather('{"days": 3}'),
    ),
    (
        families.MINICPM5,
        '<function name="get_weather"><param name="city"><![CDATA[</param>]]></param></function>',
        weather('{"city": "</param>"}'),
    ),
    (
        families.KIMI_K3,
        _kimi_k3('call tool="search"<|sep|><|open|>json type="object"<|sep|>{"query": "a"}<|close|>json<|sep|>'),
        [("search", '{"query": "a"}')],
    ),
    # Notations of their own.
    (
        families.LFM2,
        "[get_weather(city='it\\'s \\x41\\u00e9', days=-1,)]",
        weather('{"city": "it\'s Aé", "days": -1}'),
    ),
    (
        families.LFM2,
        '[search(query="a", exact=true, tags=["b"], options={"depth": None})]',
        [("search", '{"query": "a", "exact": true, "tags": ["b"], "options": {"depth": null}}')],
    ),
    (families.LFM2, "[get_weather(Paris)](link)", ["[get_weather(Paris)](link)"]),
    (
        families.GEMMA4,
        '<|tool_call>call:search{query:<|"|>a,}<|"|>,tags:[<|"|>x<|"|>],options:{depth:1}}<tool_call|>',
        [("search", '{"query": "a,}", "tags": ["x"], "options": {"depth": 1}}')],
    ),
    (families.GEMMA4, "<|tool_call>call:clock{}call:clock{}<tool_call|>", TWO),
]
