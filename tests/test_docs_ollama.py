"""docs/ollama.md says what Ollama's dialect does: endpoints, fields, their status and limits."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeHost
from pydantic import ValidationError
from test_docs import ROOT, Row, bounds, by_name, code, fields, subclasses, table

from mlxserve.api.ollama import embed, library_schema, options, schema
from mlxserve.api.ollama.convert import chat_request
from mlxserve.api.ollama.reply import GenerateReply, Logprobs, Part, durations
from mlxserve.api.ollama.routes import COMPATIBLE_VERSION, OllamaRoutes
from mlxserve.api.ollama.times import FOREVER
from mlxserve.api.wire import WireModel
from mlxserve.core.generation import Finished, Timings, Usage
from mlxserve.core.request import FinishReason
from mlxserve.errors import InvalidParameter

PAGE = (ROOT / "docs" / "ollama.md").read_text(encoding="utf-8")
CHAT = by_name(table(PAGE, "### Chat"))


def below(prefix: str) -> dict[str, Row]:
    return {
        name.removeprefix(prefix): row for name, row in CHAT.items() if re.fullmatch(re.escape(prefix) + r"\w+", name)
    }


DOCUMENTED: dict[type[WireModel], dict[str, Row]] = {
    schema.GenerationFields: by_name(table(PAGE, "### Generate and chat")),
    schema.GenerateRequest: by_name(table(PAGE, "### Generate")),
    schema.ChatRequest: below(""),
    schema.Message: below("messages[]."),
    schema.ToolCall: below("messages[].tool_calls[]."),
    schema.FunctionCall: below("messages[].tool_calls[].function."),
    schema.Tool: below("tools[]."),
    schema.Function: below("tools[].function."),
    options.Options: by_name(table(PAGE, "### Options")),
    embed.EmbedFields: by_name(table(PAGE, "### Embeddings")),
    embed.EmbedRequest: by_name(table(PAGE, "### Embed")),
    embed.EmbeddingsRequest: by_name(table(PAGE, "### Legacy embeddings")),
    library_schema.NamedModel: by_name(table(PAGE, "### Models")),
    library_schema.ShowRequest: by_name(table(PAGE, "### Show")),
    library_schema.PullRequest: by_name(table(PAGE, "### Pull")),
    library_schema.DeleteRequest: {},
    library_schema.CopyRequest: by_name(table(PAGE, "### Copy")),
    library_schema.CreateRequest: by_name(table(PAGE, "### Create")),
}
ROWS = [(model, name, row) for model, rows in DOCUMENTED.items() for name, row in rows.items()]


def faults(model: type[WireModel], field: str, value: Any) -> set[str]:
    """Types of pydantic's errors about one field of a body that has only this one."""
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        return {fault["type"] for fault in error.errors() if fault["loc"][0] == field}
    except InvalidParameter:
        pass  # fields that do not go together
    return set()


def test_every_model_has_its_table() -> None:
    models = {model for model in subclasses(WireModel) if model.__module__.startswith("mlxserve.api.ollama.")}
    assert models == set(DOCUMENTED)


@pytest.mark.parametrize("model", DOCUMENTED)
def test_tables_have_exactly_the_fields_of_the_schema(model: type[WireModel]) -> None:
    inherited = set().union(*(fields(parent) for parent in model.__mro__[1:] if parent in DOCUMENTED))
    assert set(DOCUMENTED[model]) == fields(model) - inherited


@pytest.mark.parametrize(("model", "name", "row"), ROWS)
def test_fields_have_the_status_that_is_documented(model: type[WireModel], name: str, row: Row) -> None:
    assert row[1] in ("supported", "no effect", "refused")
    assert (row[1] == "refused") == (faults(model, name, {"never": "heard of"}) == {"unsupported_parameter"})
    if row[1] == "refused":
        assert code(row[2])
        for value in ("null", *code(row[2])):
            assert not faults(model, name, json.loads(value))


@pytest.mark.parametrize(("model", "name", "row"), ROWS)
def test_limits_are_the_documented_ones(model: type[WireModel], name: str, row: Row) -> None:
    if row[1] != "refused":
        limits = set(bounds(model.model_json_schema()["properties"][name]))
        assert {int(number) for number in re.findall(r"-?\d+", row[2])} == limits


def test_fields_without_effect_change_no_request() -> None:
    samples = {"integer": 7, "number": 0.7, "boolean": True, "string": "x"}

    def unused(model: type[WireModel]) -> dict[str, Any]:
        return {name: samples[row[2]] for name, row in DOCUMENTED[model].items() if row[1] == "no effect"}

    assert unused(options.Options).keys() == options.WITHOUT_EFFECT
    assert unused(schema.GenerationFields)
    plain = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body = {**plain, **unused(schema.GenerationFields), "options": unused(options.Options)}
    model = SimpleNamespace(default_sampling={})
    requests = [chat_request(schema.ChatRequest.model_validate(each), "id", model) for each in (plain, body)]
    assert requests[0] == requests[1]


def test_defaults_are_the_documented_ones() -> None:
    rows = DOCUMENTED[options.Options]
    for name, value in options.DEFAULTS.items():
        assert f"the model's, else {value}" in rows[name][3]


def test_endpoints_are_the_documented_ones() -> None:
    routes = OllamaRoutes(FakeHost(), max_body_bytes=1, allow_pull=True, model_dirs=()).routes()
    found = {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}
    assert set(by_name(table(PAGE, "## Endpoints"))) == found | {"GET /"}
    assert f'{{"version":"{COMPATIBLE_VERSION}"}}' in PAGE
    assert f"in the year {FOREVER[:4]}" in PAGE


def test_the_fields_of_the_end_are_the_documented_ones() -> None:
    reply = GenerateReply("m", Logprobs(lambda token_id: b"", is_wanted=False))
    finished = Finished(FinishReason.STOP, None, Usage(1, 0, 1), Timings(0, 0, 0, 0, 0, 0))
    end = reply.end(Part(), finished, []).keys() - reply.line(Part()).keys()
    assert set(by_name(table(PAGE, "## Streams"))) == end
    assert durations(finished).keys() < end
