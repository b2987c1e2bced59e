"""The documents say what the code does: fields, errors, metrics, settings, flags, and links that lead somewhere."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from mlxserve import errors
from mlxserve.api import failures, wire
from mlxserve.api.anthropic import blocks, schema
from mlxserve.api.anthropic.convert import generation_request
from mlxserve.api.anthropic.errors import error_object, error_response
from mlxserve.api.metrics import Metrics
from mlxserve.api.openai.convert import chat_request
from mlxserve.api.openai.embeddings import EmbeddingsRequest
from mlxserve.api.openai.messages import FunctionCall, Message, TextPart, ToolCall
from mlxserve.api.openai.reply import timings_object
from mlxserve.api.openai.responses import convert as response_convert
from mlxserve.api.openai.responses import items as response_items
from mlxserve.api.openai.responses import schema as responses
from mlxserve.api.openai.responses import tools as response_tools
from mlxserve.api.openai.schema import ChatCompletionRequest, CompletionFields, CompletionRequest, StreamOptions
from mlxserve.api.openai.structured import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from mlxserve.api.openai.text_schema import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from mlxserve.api.openai.tools import (
    AllowedTools,
    ChosenTools,
    FunctionDefinition,
    FunctionReference,
    Tool,
    ToolReference,
)
from mlxserve.api.wire import WireModel
from mlxserve.cli import repl_help
from mlxserve.cli.app import app
from mlxserve.config import EngineConfig, ServerConfig
from mlxserve.core.generation import Timings, Usage
from mlxserve.core.stats import EngineStats
from mlxserve.store import alias_file, modelfile, repo_files
from mlxserve.text import json_schema

ROOT = Path(__file__).parent.parent
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
ANTHROPIC = (ROOT / "docs" / "anthropic.md").read_text(encoding="utf-8")
RESPONSES = (ROOT / "docs" / "responses.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

Row = list[str]


def table(page: str, heading: str) -> list[Row]:
    """The rows of all tables under a heading, without their header lines."""
    _, found, rest = page.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    section = re.split(r"^#+ ", without_code(rest), maxsplit=1, flags=re.MULTILINE)[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    rules = {number for number, row in enumerate(rows) if set("".join(row)) == {"-"}}
    return [row for number, row in enumerate(rows) if not {number, number + 1} & rules]


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def by_name(rows: list[Row]) -> dict[str, Row]:
    """Rows by the first thing in backticks; there must not be two of a name."""
    named = {code(row[0])[0]: row for row in rows}
    assert len(named) == len(rows)
    return named


def below(prefix: str, heading: str = "### Inside messages and stream_options") -> dict[str, Row]:
    rows = by_name(table(API, heading))
    return {
        name.removeprefix(prefix): row for name, row in rows.items() if re.fullmatch(re.escape(prefix) + r"\w+", name)
    }


STRUCTURED = "### Structured output"
TOOLS = "### Tools"
DOCUMENTED: dict[type[WireModel], dict[str, Row]] = {
    CompletionFields: by_name(table(API, "### Both kinds of completions")),
    ChatCompletionRequest: by_name(table(API, "### Chat completions")),
    CompletionRequest: by_name(table(API, "### Completions")),
    Message: below("messages[]."),
    TextPart: below("messages[].content[]."),
    ToolCall: below("messages[].tool_calls[]."),
    FunctionCall: below("messages[].tool_calls[].function."),
    StreamOptions: below("stream_options."),
    Tool: below("tools[].", TOOLS),
    FunctionDefinition: below("tools[].function.", TOOLS),
    ChosenTools: below("tool_choice.", TOOLS),
    FunctionReference: below("tool_choice.function.", TOOLS),
    AllowedTools: below("tool_choice.allowed_tools.", TOOLS),
    ToolReference: below("tool_choice.allowed_tools.tools[].", TOOLS),
    TokenizeRequest: by_name(table(API, "### Tokenize")),
    DetokenizeRequest: by_name(table(API, "### Detokenize")),
    ApplyTemplateRequest: by_name(table(API, "### Apply-template")),
    ResponseFormat: below("response_format.", STRUCTURED),
    JsonSchemaFormat: below("response_format.json_schema.", STRUCTURED),
    StructuredOutputs: below("structured_outputs.", STRUCTURED),
    EmbeddingsRequest: by_name(table(API, "## Embeddings")),
    schema.PromptFields: by_name(table(ANTHROPIC, "### Prompt")),
    schema.CountTokensRequest: {},
    schema.MessagesRequest: by_name(table(ANTHROPIC, "### Generation")),
    schema.Message: by_name(table(ANTHROPIC, "### Anthropic messages")),
    schema.Tool: by_name(table(ANTHROPIC, "### Anthropic tools")),
    schema.ToolChoice: by_name(table(ANTHROPIC, "### tool_choice")),
    schema.ThinkingConfig: by_name(table(ANTHROPIC, "### thinking")),
    schema.OutputConfig: by_name(table(ANTHROPIC, "### output_config")),
    schema.OutputFormat: by_name(table(ANTHROPIC, "### output_config.format")),
    blocks.CacheControl: by_name(table(ANTHROPIC, "### cache_control")),
    blocks.TextBlock: by_name(table(ANTHROPIC, "### Text blocks")),
    blocks.ThinkingBlock: by_name(table(ANTHROPIC, "### Thinking blocks")),
    blocks.RedactedThinkingBlock: by_name(table(ANTHROPIC, "### Redacted thinking blocks")),
    blocks.ToolUseBlock: by_name(table(ANTHROPIC, "### Tool use blocks")),
    blocks.ToolResultBlock: by_name(table(ANTHROPIC, "### Tool result blocks")),
    responses.PromptFields: by_name(table(RESPONSES, "### Response prompt")),
    responses.InputTokensRequest: {},
    responses.ResponseRequest: by_name(table(RESPONSES, "### Response generation")),
    responses.ReasoningConfig: by_name(table(RESPONSES, "### Response reasoning")),
    responses.TextConfig: by_name(table(RESPONSES, "### Response text")),
    responses.TextFormat: by_name(table(RESPONSES, "### Response text format")),
    responses.StreamOptions: by_name(table(RESPONSES, "### Response stream_options")),
    response_items.MessageItem: by_name(table(RESPONSES, "#### Message items")),
    response_items.TextPart: by_name(table(RESPONSES, "#### Text parts")),
    response_items.ReasoningItem: by_name(table(RESPONSES, "#### Reasoning items")),
    response_items.ThoughtPart: by_name(table(RESPONSES, "#### Thoughts")),
    response_items.FunctionCallItem: by_name(table(RESPONSES, "#### Function call items")),
    response_items.FunctionCallOutputItem: by_name(table(RESPONSES, "#### Function call output items")),
    response_tools.FunctionTool: by_name(table(RESPONSES, "### Function tools")),
    response_tools.NamespaceTool: by_name(table(RESPONSES, "### Namespaces")),
    response_tools.ForeignTool: by_name(table(RESPONSES, "### Other tools")),
    response_tools.NamedFunction: by_name(table(RESPONSES, "### Named functions")),
    response_tools.AllowedTools: by_name(table(RESPONSES, "### Allowed tools")),
}
SHARED = (CompletionFields, schema.PromptFields, responses.PromptFields)
"""Models whose fields are documented once for those made from them."""
ROWS = [(model, name, row) for model, rows in DOCUMENTED.items() for name, row in rows.items()]


def fields(model: type[WireModel]) -> set[str]:
    """Names as they stand on the wire."""
    return {field.alias or name for name, field in model.model_fields.items()}


def subclasses(model: type[WireModel]) -> Iterator[type[WireModel]]:
    for each in model.__subclasses__():
        yield each
        yield from subclasses(each)


def faults(model: type[WireModel], field: str, value: Any) -> set[str]:
    """Types of pydantic's errors about one field of a body that has only this one."""
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        return {fault["type"] for fault in error.errors() if fault["loc"][0] == field}
    return set()


def bounds(schema: Any) -> Iterator[int]:
    """Every limit in a JSON schema, as the last number that is allowed; of real numbers as it stands."""
    if isinstance(schema, list):
        for item in schema:
            yield from bounds(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in (
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "minLength",
                "maxLength",
                "minItems",
                "maxItems",
                "maxProperties",
            ):
                yield int(value)
            elif key == "exclusiveMaximum":
                yield int(value) - 1
            else:
                yield from bounds(value)


def test_every_model_has_its_table() -> None:
    models = {model for model in subclasses(WireModel) if not model.__module__.startswith("mlxserve.api.ollama.")}
    assert models == set(DOCUMENTED)


@pytest.mark.parametrize("model", DOCUMENTED)
def test_tables_have_exactly_the_fields_of_the_schema(model: type[WireModel]) -> None:
    inherited = {name for shared in SHARED if model in shared.__subclasses__() for name in fields(shared)}
    assert set(DOCUMENTED[model]) == fields(model) - inherited


def test_schema_keywords_are_the_documented_ones() -> None:
    _, _, text = API.partition("**JSON schemas.**")
    enforced, _, rest = text.partition("Without effect")
    words = set(code(enforced))
    assert words == json_schema.KEYWORDS | json_schema.FORMATS
    assert set(code(rest.partition("Any other keyword")[0])) == json_schema.ANNOTATIONS | {"$id"}


@pytest.mark.parametrize(("model", "name", "row"), ROWS)
def test_fields_have_the_status_that_is_documented(model: type[WireModel], name: str, row: Row) -> None:
    assert row[1] in ("supported", "no effect", "refused")
    assert (row[1] == "refused") == (faults(model, name, {"never": "heard of"}) == {"unsupported_parameter"})
    if row[1] == "refused":
        for value in ("null", *code(row[2])):
            assert not faults(model, name, json.loads(value))
        assert code(row[2]) or not re.search(r"\w", row[2])


@pytest.mark.parametrize(("model", "name", "row"), ROWS)
def test_limits_are_the_documented_ones(model: type[WireModel], name: str, row: Row) -> None:
    limits = set(bounds(model.model_json_schema()["properties"][name]))
    if row[1] != "refused":
        assert {int(number) for number in re.findall(r"(?<![a-z\d])-?\d+", row[2])} == limits


def test_fields_without_effect_change_no_request() -> None:
    samples = {"string": "x", "boolean": True, "object of strings": {"a": "b"}}
    plain = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    expected = chat_request(ChatCompletionRequest.model_validate(plain), "id", {})
    rows = [DOCUMENTED[CompletionFields], DOCUMENTED[ChatCompletionRequest]]
    fields = {name: samples[row[2]] for part in rows for name, row in part.items() if row[1] == "no effect"}
    assert len(fields) > 5
    assert chat_request(ChatCompletionRequest.model_validate(plain | fields), "id", {}) == expected


def test_anthropic_fields_without_effect_change_no_request() -> None:
    samples = {"string": "x", "object": {"a": "b"}, "boolean": True, "`auto`, `standard_only`": "auto"}
    cached = {"cache_control": {"type": "ephemeral", "ttl": "5m", "scope": "global"}}
    plain: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    plain["tools"] = [{"name": "look", "input_schema": {}}]
    rows = {**DOCUMENTED[schema.PromptFields], **DOCUMENTED[schema.MessagesRequest]}
    given = {name: samples[row[2]] for name, row in rows.items() if row[1] == "no effect" and name not in cached}
    assert len(given) > 3
    tool = {name: samples[row[2]] for name, row in DOCUMENTED[schema.Tool].items() if row[1] == "no effect"} | cached
    full = plain | given | cached | {"tools": [plain["tools"][0] | tool]}
    expected, found = (
        generation_request(schema.MessagesRequest.model_validate(body), "id", {}) for body in (plain, full)
    )
    assert found == expected


def test_response_fields_without_effect_change_no_request() -> None:
    samples = {"string": "x", "object": {"a": "b"}, "integer": 3, "list of strings": ["x"]}
    rows = DOCUMENTED[responses.ResponseRequest]
    given = {name: samples[row[2]] for name, row in rows.items() if row[1] == "no effect"}
    assert len(given) > 5
    bodies = [responses.ResponseRequest.model_validate({"model": "m", "input": "Hi"} | more) for more in ({}, given)]
    requests = [
        response_convert.generation_request(
            body, response_convert.chat_prompt(body, (), response_convert.request_toolbox(body)), "id", {}
        )
        for body in bodies
    ]
    assert requests[0] == requests[1]


def test_anthropic_errors_are_the_documented_ones() -> None:
    documented = {
        (status, code(row[1])[0]) for row in table(ANTHROPIC, "## Anthropic errors") for status in row[0].split(", ")
    }
    every = [
        errors.QueueFull("m", retry_after=1),
        HTTPException(403),
        HTTPException(405),
        HTTPException(408),
        HTTPException(413),
    ]
    every += [HTTPException(401), HTTPException(415), errors.RequestError("m"), errors.ModelNotFound("m", model="m")]
    every += [errors.EngineError("m"), errors.EngineDead("m"), errors.RequestTimeout("m")]
    found = set()
    for error in every:
        status = str(error_response(error, "id").status_code)
        found.add((status, error_object(error, "id")["error"]["type"]))
    assert found == documented


def test_errors_are_the_documented_ones() -> None:
    fault = (400, "invalid_request_error")
    own = ("invalid_json", "invalid_type", "context_length_exceeded", *wire._PYDANTIC_CODES.values())
    expected = {
        *failures._KINDS.values(),
        *((status, *kind) for status, kind in failures._HTTP_KINDS.items()),
        *((*fault, name) for name in own),
        failures._INTERNAL,
    }
    rows = table(API, "## Errors")
    documented = [(int(row[0]), code(row[1])[0], code(row[2])[0]) for row in rows]
    assert sorted(documented) == sorted(expected)


def test_timings_are_the_documented_ones() -> None:
    timings = timings_object(Usage(1, 0, 1), Timings(0, 0, 0, 0, 0, 0))
    assert list(by_name(table(API, "## Timings"))) == list(timings)


def test_metrics_are_the_documented_ones() -> None:
    metrics = Metrics()
    metrics.watch(lambda: {"m": EngineStats(*[0] * len(dataclasses.fields(EngineStats)))})
    lines = re.findall(r"^# TYPE (\w+) (\w+)$", metrics.render().decode(), flags=re.MULTILINE)
    rendered = {name: kind for name, kind in lines if not name.endswith("_created")}
    assert {name: row[1] for name, row in by_name(table(API, "## Metrics")).items()} == rendered


def flags(*command: str) -> set[str]:
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    return {name for each in found.params if each.param_type_name == "option" for name in each.opts} - {"--help"}


def test_settings_are_the_documented_ones() -> None:
    fields = {field.name: field for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    rows = by_name(table(CLI, "## Settings"))
    assert set(rows) == set(fields)
    for name, row in rows.items():
        default = fields[name].default
        shown = json.dumps(default) if isinstance(default, bool) else str(default)
        assert code(row[2]) == ([] if default in (None, ()) else [shown])
        words = f"no_{name.removeprefix('enable_')}" if default is True else name
        flag = "--" + words.replace("_", "-")
        assert code(row[1]) == ([flag] if flag in flags("serve") else [])


def test_flags_are_the_documented_ones() -> None:
    rows = table(CLI, "## mlxserve run")
    documented = {word.split()[0] for row in rows for word in code(row[0]) if word.startswith("--")}
    assert documented == flags("run")
    settings = {word for row in table(CLI, "## Settings") for word in code(row[1])}
    assert flags("serve") == settings | {"--model", "--daemon"}
    assert {words[0] for row in table(CLI, "## mlxserve serve") for words in [code(row[0])]} == {
        "--model M",
        "--daemon",
    }


@pytest.mark.parametrize("command", ["ps", "stop", "top", "doctor", "config"])
def test_flags_of_small_commands_are_the_documented_ones(command: str) -> None:
    rows = table(CLI, f"## mlxserve {command}")
    assert {word.split()[0] for row in rows for word in code(row[0]) if word.startswith("--")} == flags(command)


def test_commands_are_the_documented_ones() -> None:
    listed = set(re.findall(r"^mlxserve (\w+)", CLI.partition("```")[2].partition("```")[0], re.M))
    shown = {name for name, command in typer.main.get_command(app).commands.items() if not command.hidden}
    assert listed == shown


def test_flags_of_bench_are_the_documented_ones() -> None:
    rows = table(CLI, "## mlxserve bench")
    documented = [[word.split()[0] for word in code(row[0]) if word.startswith("--")] for row in rows]
    # The second table begins with --model, too.
    second = len(documented) - documented[::-1].index(["--model"]) - 1
    assert {name for names in documented[:second] for name in names} == flags("bench")
    assert {name for names in documented[second:] for name in names} == flags("bench", "study")


def test_flags_of_the_commands_for_models_are_the_documented_ones() -> None:
    documented: dict[str, set[str]] = {}
    names: list[str] = []
    for row in table(CLI, "## Models"):
        names = [word.split()[0] for word in code(row[0])] or names
        words = {word.split()[0] for word in code(row[1])}
        for name in names:
            documented[name] = documented.get(name, set()) | words
    assert documented == {name: flags(name) for name in documented}
    assert documented.keys() == {"pull", "list", "ls", "show", "search", "cp", "create", "rm"}


def test_models_toml_and_modelfiles_are_documented() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = by_name(table(models, "## models.toml"))
    assert set(rows) == alias_file.FIELDS
    assert tuple(code(rows["sampling"][1])) == alias_file.SAMPLING_KEYS
    assert tuple(by_name(table(models, "## Store"))) == repo_files.GGUF_PREFERENCE
    instructions = {word.lower() for row in table(models, "## Create") for word in code(row[0])}
    assert instructions == {*modelfile.INSTRUCTIONS, "parameter", *modelfile.REFUSED}


def test_commands_of_the_conversation_are_the_documented_ones() -> None:
    expected = {(name,) for name in re.findall(r"/\?|/\w+", repl_help.HELP)} - {("/set",), ("/show",)}
    for name, first, second in re.findall(
        r"^  (/\w+) (\w+)(?: \| (\w+))?", repl_help.SET_HELP + "\n" + repl_help.SHOW_HELP, re.M
    ):
        expected |= {(name, word) for word in (first, second) if word}
    rows = [name.split() for row in table(CLI, "### Conversation") for name in code(row[0])]
    documented = {tuple(words[: 2 if words[0] in ("/set", "/show") else 1]) for words in rows}
    assert documented == expected | {("/exit",)}


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", without_code(file.read_text(encoding="utf-8")), flags=re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, target


def test_links_are_looked_at() -> None:
    assert "](api.md#timings)" in CLI
    assert {"README.md", "api.md", "cli.md"} <= {page.name for page in PAGES}
