"""The fields that say what an answer must be, over HTTP: what they become, what is refused; and the command line's."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeHost
from helpers_engine import on_loop
from helpers_served import make_generation_request, read, serving
from pydantic import BaseModel
from test_cli_repl import converse

from mlxserve.cli.parameters import ChatParameters
from mlxserve.core.constraint import JSON_OBJECT, Grammar
from mlxserve.core.request import FinishReason
from mlxserve.core.step import ScheduledStep
from mlxserve.engine.timeline import Timeline
from mlxserve.errors import EngineError, InvalidParameter

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == "chat/completions" else {"prompt": "Hi"}
    return http.post(f"/v1/{path}", json={"model": "fake", **prompt, **fields})


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", JSON_OBJECT, "response_format")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", SCHEMA, "response_format"),
    ),
    (json_schema(schema=SCHEMA, strict=True), Grammar("json_schema", SCHEMA, "response_format")),
    (json_schema(schema=SCHEMA, strict=False, description="d"), Grammar("json_schema", SCHEMA, "response_format")),
    (json_schema(schema=True, name=None), Grammar("json_schema", True, "response_format")),
    ({"structured_outputs": None}, None),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", SCHEMA, "structured_outputs.json")),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        Grammar("json_schema", SCHEMA, "structured_outputs.json", " ?"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Grammar("json_schema", JSON_OBJECT, "structured_outputs.json_object", ""),
    ),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", ("a", "b"), "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("grammar", "start: /a/", "structured_outputs.grammar")),
    ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA, "guided_json")),
    (
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""},
        Grammar("json_schema", SCHEMA, "guided_json", ""),
    ),
    ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, Grammar("choice", ("a",), "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"', "guided_grammar")),
    ({"json_schema": SCHEMA}, Grammar("json_schema", SCHEMA, "json_schema")),
    ({"grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"', "grammar")),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_is_asked_for_reaches_the_model(host: FakeHost, http: httpx.Client, path: str) -> None:
    for fields, grammar in ASKED:
        response = post(http, path, **fields)
        assert response.status_code == 200, response.text
        assert host.requests[-1].grammar == grammar


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (json_schema(), "response_format.json_schema.schema", "missing_required_parameter"),
    (json_schema(schema="{}"), "response_format.json_schema.schema", "invalid_type"),
    (json_schema(schema=None), "response_format.json_schema.schema", "invalid_type"),
    ({"guided_json": 3}, "guided_json", "invalid_type"),
    ({"json_schema": "{}"}, "json_schema", "invalid_type"),
    (json_schema(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict", "invalid_type"),
    (json_schema(schema=SCHEMA, stict=True), "response_format.json_schema.stict", "unknown_parameter"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "invalid_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar", "invalid_value"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "invalid_type"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "unsupported_parameter",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": ""}},
        "structured_outputs.whitespace_pattern",
        "invalid_value",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "unsupported_parameter"),
    ({"guided_json": "nope"}, "guided_json", "invalid_value"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"grammar": 'root ::= "a"', "json_schema": SCHEMA}, "grammar", "invalid_value"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused(host: FakeHost, http: httpx.Client, fields: dict[str, Any], param: str, code: str) -> None:
    response = post(http, "chat/completions", **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error["message"]
    assert host.requests == []


def test_openais_client_parses_into_a_model_of_pydantics(host: FakeHost, running: tuple[FakeHost, str]) -> None:
    class Event(BaseModel):
        """What its SDK makes of it has titles, a description, additionalProperties and $defs."""

        class Guest(BaseModel):
            name: str

        title: str
        guests: list[Guest]

    host.script.text = '{"title": "t", "guests": [{"name": "n"}]}'
    with openai.OpenAI(base_url=running[1] + "/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.parse(
            model="fake", messages=[{"role": "user", "content": "Hi"}], response_format=Event
        )
    assert done.choices[0].message.parsed == Event(title="t", guests=[Event.Guest(name="n")])
    grammar = host.requests[-1].grammar
    assert grammar is not None
    assert grammar.source["properties"]["guests"]["items"] == {"$ref": "#/$defs/Guest"}


# --- admission and the end of a generation ---


@on_loop
async def test_a_grammar_is_compiled_before_anything_is_queued() -> None:
    async with serving() as served:
        for grammar, sampling, param in (
            (Grammar("json_schema", {"not": {}}, "response_format"), {}, "response_format"),
            (Grammar("regex", "(", "guided_regex"), {}, "guided_regex"),
            (Grammar("regex", "a", "guided_regex"), {"ignore_eos": True}, "ignore_eos"),
        ):
            request = make_generation_request("r", grammar=grammar, **sampling)
            with pytest.raises(InvalidParameter) as refused:
                await served.model.generate(request)
            assert refused.value.param == param
        assert served.runner.steps == []
        assert [record.outcome for record in served.observer.records] == ["InvalidParameter"] * 3
        generation = await served.model.generate(
            make_generation_request("ok", grammar=Grammar("regex", "[a-p]{3,}", "p"), max_tokens=4)
        )
        answer = await read(generation)
        assert answer.finished is not None
        assert {row.is_constrained for step in served.runner.steps for row in step.decode} == {True}


@on_loop
async def test_a_constraint_that_fails_tells_its_client_why_and_no_other() -> None:
    async with serving() as served:
        stock = served.runner.run

        def run(step: ScheduledStep, masks: object = None) -> Any:
            result = stock(step, masks)
            failures = {index: "why" for index, row in enumerate(step.decode) if row.is_constrained}
            return replace(result, failures=failures)

        served.runner.run = run  # type: ignore[method-assign]
        grammar = Grammar("regex", "[a-p]+", "p")
        constrained, free = (
            await served.model.generate(make_generation_request("constrained", grammar=grammar)),
            await served.model.generate(make_generation_request("free", "the dog")),
        )
        failed, fine = await asyncio.gather(read(constrained), read(free))
        assert isinstance(failed.error, EngineError)
        assert str(failed.error) == "the answer cannot go on within its grammar: why"
        assert fine.finished is not None
        assert fine.finished.reason is FinishReason.LENGTH
        await served.idle()


@on_loop
@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 2}])
async def test_what_goes_past_the_end_of_a_grammar_is_refused(field: dict[str, Any]) -> None:
    async with serving() as served:
        request = make_generation_request("refused", grammar=Grammar("regex", "a", "p"), **field)
        with pytest.raises(InvalidParameter, match="past the end that 'p' gives the answer"):
            await served.model.generate(request)


@on_loop
async def test_each_of_several_answers_is_at_a_place_of_its_own() -> None:
    async with serving() as served:
        request = make_generation_request(grammar=Grammar("regex", "[a-c]{3}", "p"))
        constraints = served.model._reader.read(request, 3, Timeline()).constraints
        token_id = served.model.tokenizer.encode("a", add_special_tokens=False)[-1]
        assert [constraint.num_accepted([token_id] * 4) for constraint in constraints] == [3, 3, 3]
        constraints[1].advance([token_id, token_id])
        assert [constraint.num_accepted([token_id] * 4) for constraint in constraints] == [3, 1, 3]


# --- the command line ---


def test_format_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert ChatParameters().grammar is None
    assert "response_format" not in ChatParameters(seed=1).given()
    for text, schema in (("json", JSON_OBJECT), (str(file), SCHEMA)):
        parameters = ChatParameters(seed=1).with_format(text)
        assert parameters.grammar == Grammar("json_schema", schema, "format")
        wire = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert parameters.given() == {"seed": 1, "response_format": wire}
        assert parameters.sampling() == {"seed": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("3", "must be an object or a boolean"),
        ('{"requierd": []}', "'requierd' is not supported"),
        ('{"$ref": "http://x/y"}', "leads out of the schema"),
    ],
)
def test_files_that_are_no_format(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidParameter, match=reason) as refused:
        ChatParameters().with_format(str(file))
    assert str(file) in str(refused.value)


def test_format_in_a_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    lines = ["/set format json", "one", f"/set format {file}", "two", "/set noformat", "three"]
    backend, _ = converse(*lines, "/set format nope.json", "four")
    assert [parameters.schema for _, parameters in backend.requests] == [JSON_OBJECT, SCHEMA, None, None]
    printed = capsys.readouterr()
    assert "Answers are JSON.\n" in printed.out
    assert f"Answers are JSON by the schema in {file}.\n" in printed.out
    assert "Answers have any form.\n" in printed.out
    assert "'nope.json' cannot be read" in printed.err
