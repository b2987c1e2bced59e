"""The families, and how a model's is told from its chat template and vocabulary."""

import re
from collections.abc import Callable

from mlxserve.text.harmony import is_harmony
from mlxserve.text.tool_calls.family import Family
from mlxserve.text.tool_calls.gemma import GemmaCalls
from mlxserve.text.tool_calls.harmony_calls import HARMONY
from mlxserve.text.tool_calls.json_calls import NamedCalls, ObjectCalls
from mlxserve.text.tool_calls.kimi_k3 import KimiK3Calls
from mlxserve.text.tool_calls.mistral import MistralCalls
from mlxserve.text.tool_calls.pythonic import PythonicCalls
from mlxserve.text.tool_calls.tagged import TaggedCalls

HERMES = ObjectCalls(
    "hermes",
    starts=("<tool_call>",),
    prefix="<tool_call>\n",
    suffix="\n</tool_call>",
    separator="\n",
    markers=("</tool_call>",),
)
GENERIC = ObjectCalls(
    "generic",
    starts=("<tool_call>",),
    line_starts=("{",),
    prefix="<tool_call>\n",
    suffix="\n</tool_call>",
    separator="\n",
    markers=("</tool_call>",),
)
LLAMA3 = ObjectCalls(
    "llama3",
    starts=("<|python_tag|>",),
    line_starts=("{",),
    arguments_key="parameters",
    separator="; ",
    separators=(";",),
)
MISTRAL_LIST = MistralCalls(
    "mistral-list", opening="[TOOL_CALLS][", separator=", ", closing="]", starts=("[TOOL_CALLS]",), in_list=True
)
MISTRAL = MistralCalls("mistral", starts=("[TOOL_CALLS]",), markers=("[ARGS]", "[CALL_ID]"))
GRANITE3 = ObjectCalls("granite3", opening="<|tool_call|>[", separator=", ", closing="]", starts=("<|tool_call|>",))
PHI4 = ObjectCalls(
    "phi4",
    opening="<|tool_call|>[",
    separator=", ",
    closing="]<|/tool_call|>",
    starts=("<|tool_call|>",),
    ends=("<|/tool_call|>",),
    markers=("<|/tool_call|>",),
)
COMMAND_R = ObjectCalls(
    "command-r",
    opening="<|START_ACTION|>[",
    separator=", ",
    closing="]<|END_ACTION|>",
    starts=("<|START_ACTION|>",),
    name_key="tool_name",
    arguments_key="parameters",
    ends=("<|END_ACTION|>",),
    markers=("<|END_ACTION|>",),
)
NEMOTRON = ObjectCalls(
    "nemotron",
    opening="<TOOLCALL>[",
    separator=", ",
    closing="]</TOOLCALL>",
    starts=("<TOOLCALL>",),
    ends=("</TOOLCALL>",),
    markers=("</TOOLCALL>",),
)
KIMI_K2 = NamedCalls(
    "kimi-k2",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    prefixes=("<|tool_call_begin|>",),
    between=("<|tool_call_argument_begin|>",),
    suffix="<|tool_call_end|>",
    markers=("<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    is_indexed=True,
)
_DEEPSEEK = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
DEEPSEEK_V3 = NamedCalls(
    "deepseek-v3",
    opening=_DEEPSEEK[0],
    separator="\n",
    closing=_DEEPSEEK[1],
    starts=(_DEEPSEEK[0],),
    prefixes=(_DEEPSEEK[2] + "function" + _DEEPSEEK[4],),
    between=("\n```json\n",),
    suffix="\n```" + _DEEPSEEK[3],
    markers=_DEEPSEEK[1:],
)
DEEPSEEK_V31 = NamedCalls(
    "deepseek-v3.1",
    opening=_DEEPSEEK[0],
    closing=_DEEPSEEK[1],
    starts=(_DEEPSEEK[0],),
    prefixes=(_DEEPSEEK[2],),
    between=(_DEEPSEEK[4],),
    suffix=_DEEPSEEK[3],
    markers=_DEEPSEEK[1:],
)
QWEN3_CODER = TaggedCalls(
    "qwen3-coder",
    starts=("<tool_call>", "<function="),
    prefix="<tool_call>\n",
    suffix="\n</tool_call>",
    separator="\n",
    call_start="<function=",
    name_end=">",
    call_end="</function>",
    argument_start="<parameter=",
    argument_end=">",
    value_end="</parameter>",
    margin="\n",
    ends=("</tool_call>",),
    markers=("</tool_call>",),
)
MINIMAX_M2 = TaggedCalls(
    "minimax-m2",
    opening="<minimax:tool_call>\n",
    separator="\n",
    closing="\n</minimax:tool_call>",
    starts=("<minimax:tool_call>",),
    call_start='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    argument_start='<parameter name="',
    argument_end='">',
    value_end="</parameter>",
    ends=("</minimax:tool_call>",),
    markers=("</minimax:tool_call>",),
)
MUSE_SPARK = TaggedCalls(
    "muse-spark",
    opening="<atem:function_calls>\n",
    separator="\n",
    closing="\n</atem:function_calls>",
    starts=("<atem:function_calls>",),
    call_start='<atem:invoke name="',
    name_end='">',
    call_end="</atem:invoke>",
    argument_start='<atem:parameter name="',
    argument_end='">',
    value_end="</atem:parameter>",
    ends=("</atem:function_calls>",),
    markers=("</atem:function_calls>",),
)
MINICPM5 = TaggedCalls(
    "minicpm5",
    starts=('<function name="',),
    call_start='<function name="',
    name_end='">',
    call_end="</function>",
    argument_start='<param name="',
    argument_end='">',
    value_end="</param>",
    between="",
    has_cdata=True,
)
GLM = TaggedCalls(
    "glm",
    starts=("<tool_call>",),
    separator="\n",
    call_start="<tool_call>",
    call_end="</tool_call>",
    argument_start="<arg_key>",
    argument_end="</arg_key>",
    value_start="<arg_value>",
    value_end="</arg_value>",
    markers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM47 = TaggedCalls(
    "glm-4.7",
    starts=("<tool_call>",),
    call_start="<tool_call>",
    call_end="</tool_call>",
    argument_start="<arg_key>",
    argument_end="</arg_key>",
    value_start="<arg_value>",
    value_end="</arg_value>",
    between="",
    markers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LONGCAT = TaggedCalls(
    "longcat",
    starts=("<longcat_tool_call>",),
    separator="\n",
    call_start="<longcat_tool_call>",
    call_end="</longcat_tool_call>",
    argument_start="<longcat_arg_key>",
    argument_end="</longcat_arg_key>",
    value_start="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    markers=(
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
)
KIMI_K3 = KimiK3Calls(
    "kimi-k3",
    opening="<|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
    starts=("<|open|>tools<|sep|>",),
)
FUNCTION_GEMMA = GemmaCalls(
    "function-gemma",
    starts=("<start_function_call>",),
    quote="<escape>",
    ends=("<end_function_call>",),
    markers=("<end_function_call>", "<escape>"),
)
GEMMA4 = GemmaCalls(
    "gemma4", starts=("<|tool_call>",), quote='<|"|>', ends=("<tool_call|>",), markers=("<tool_call|>", '<|"|>')
)
LFM2 = PythonicCalls(
    "lfm2",
    opening="<|tool_call_start|>[",
    separator=", ",
    closing="]<|tool_call_end|>",
    starts=("<|tool_call_start|>",),
    line_starts=("[",),
    ends=("<|tool_call_end|>",),
    markers=("<|tool_call_end|>",),
)
LLAMA4 = PythonicCalls(
    "llama4",
    opening="<|python_start|>[",
    separator=", ",
    closing="]<|python_end|>",
    starts=("<|python_start|>",),
    line_starts=("[",),
    ends=("<|python_end|>",),
    markers=("<|python_end|>",),
)

FAMILIES: tuple[tuple[Family, str], ...] = (
    (MINIMAX_M2, r"<minimax:tool_call>"),
    (GEMMA4, r"<\|tool_call>.*<tool_call\|>"),
    (FUNCTION_GEMMA, r"<start_function_call>"),
    (LONGCAT, r"<longcat_tool_call>"),
    (GLM, r"</arg_key>(\\n|\n)<arg_value>"),
    (GLM47, r"<arg_key>"),
    (LFM2, r"<\|tool_list_start\|>|<\|tool_call_start\|>"),
    (QWEN3_CODER, r"<tool_call>(\\n|\n)<function="),
    (KIMI_K2, r"<\|tool_calls_section_begin\|>"),
    (MINICPM5, r'<function name="(?s:.*)<param name="'),
    (MISTRAL, r"\[TOOL_CALLS\](?s:.*)\[ARGS\]"),
    (MISTRAL_LIST, r"\[TOOL_CALLS\]"),
    (MUSE_SPARK, r"<atem:function_calls>"),
    (DEEPSEEK_V3, f"{_DEEPSEEK[0]}(?s:.*)```json"),
    (DEEPSEEK_V31, _DEEPSEEK[0]),
    (COMMAND_R, r"<\|START_ACTION\|>"),
    (NEMOTRON, r"<TOOLCALL>"),
    (PHI4, r"<\|/tool_call\|>"),
    (GRANITE3, r"<\|tool_call\|>"),
    (LLAMA4, r"<\|python_start\|>"),
    (LLAMA3, r'<\|python_tag\|>|[Ee]nvironment: ipython|"parameters": dictionary'),
    (HERMES, r"<tool_call>"),
)
"""With what a chat template has that belongs to it, a regular expression; the first that fits is the one."""

_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")


def find_family(chat_template: str | None, has_token: Callable[[str], bool]) -> Family | None:
    """How a model writes calls; None if it knows no tools.

    A template that takes tools and has none of the known marks is taken for GENERIC: most models were shown Hermes'
    form, and small ones leave its tags out.
    """
    if chat_template is None or not knows_tools(chat_template, has_token):
        return None
    if is_harmony(has_token):
        return HARMONY
    if all(map(has_token, _XTML)):
        return KIMI_K3
    for family, mark in FAMILIES:
        if re.search(mark, chat_template):
            return family
    return LFM2 if all(map(has_token, _LFM2)) else GENERIC


def knows_tools(chat_template: str | None, has_token: Callable[[str], bool]) -> bool:
    """Whether a model can be offered tools: its template does something with them, or its format is made for them."""
    if chat_template is None:
        return False
    is_made_for_them = is_harmony(has_token) or all(map(has_token, _XTML))
    return is_made_for_them or re.search(r"\btools\b", chat_template) is not None
