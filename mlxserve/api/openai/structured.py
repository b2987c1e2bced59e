"""What an answer must be, out of the fields that clients have for it.

OpenAI's `response_format`; vLLM's `structured_outputs`, and the `guided_...` fields it had before; llama-server's
`json_schema` and `grammar`. A request may have one of them.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from mlxserve.api.wire import WireModel, unsupported
from mlxserve.core.constraint import JSON_OBJECT, MAX_CHOICES, Grammar
from mlxserve.errors import InvalidParameter

if TYPE_CHECKING:
    from mlxserve.api.openai.schema import CompletionFields

Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
GrammarText = Annotated[str, Field(min_length=1)]


def _json_schema(*others: type) -> AfterValidator:
    """A schema is an object or a boolean; `others` pass as well. Not a union: errors would name its members."""

    def check(value: Any) -> Any:
        if isinstance(value, (dict, bool, *others)):
            return value
        raise PydanticCustomError("schema_type", "a JSON schema is an object or a boolean")

    return AfterValidator(check)


JsonSchema = Annotated[Any, _json_schema(type(None))]
JsonSchemaOrText = Annotated[Any, _json_schema(type(None), str)]


class JsonSchemaFormat(WireModel):
    json_schema: Annotated[Any, _json_schema(), Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: Annotated[JsonSchema, Field(alias="schema")] = None
    """llama-server has it beside the type json_object."""


class StructuredOutputs(WireModel):
    json_schema: Annotated[JsonSchemaOrText, Field(alias="json")] = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Annotated[Any, unsupported()] = None
    disable_fallback: Annotated[Any, unsupported(False)] = None
    disable_additional_properties: Annotated[Any, unsupported(False)] = None


def requested_grammar(body: "CompletionFields") -> Grammar | None:
    """The grammar a body asks for.

    Raises:
        InvalidParameter: it asks for several, or a schema in a string is no JSON.
    """
    asked = [*_of_response_format(body.response_format), *_of_structured_outputs(body.structured_outputs)]
    asked += _of_guided_fields(body)
    if body.json_schema is not None:
        asked.append(Grammar("json_schema", body.json_schema, "json_schema"))
    if body.grammar is not None:
        asked.append(Grammar("grammar", body.grammar, "grammar"))
    if len(asked) > 1:
        raise InvalidParameter(
            f"'{asked[0].param}' and '{asked[1].param}' both say what the answer must be; send one of them.",
            param=asked[1].param,
        )
    return asked[0] if asked else None


def _of_response_format(asked: ResponseFormat | None) -> list[Grammar]:
    if asked is None:
        return []
    _refuse_beside(asked.type != "json_schema" and asked.json_schema is not None, "response_format.json_schema")
    _refuse_beside(asked.type != "json_object" and asked.object_schema is not None, "response_format.schema")
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        schema = JSON_OBJECT if asked.object_schema is None else asked.object_schema
        return [Grammar("json_schema", schema, "response_format")]
    if asked.json_schema is None:
        raise InvalidParameter(
            "Missing required parameter: 'response_format.json_schema'.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return [Grammar("json_schema", asked.json_schema.json_schema, "response_format")]


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[Grammar]:
    if asked is None:
        return []
    whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    grammars = _grammars("structured_outputs.", asked.json_schema, asked.regex, asked.choice, asked.grammar, whitespace)
    if asked.json_object:
        grammars.append(Grammar("json_schema", JSON_OBJECT, "structured_outputs.json_object", whitespace))
    is_json = asked.json_schema is not None or bool(asked.json_object)
    _refuse_beside(whitespace is not None and not is_json, "structured_outputs.whitespace_pattern")
    if not grammars:
        raise InvalidParameter(
            "'structured_outputs' needs one of json, json_object, regex, choice and grammar.",
            param="structured_outputs",
        )
    return grammars


def _of_guided_fields(body: "CompletionFields") -> list[Grammar]:
    _refuse_beside(body.guided_whitespace_pattern is not None and body.guided_json is None, "guided_whitespace_pattern")
    return _grammars(
        "guided_",
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.guided_whitespace_pattern,
    )


def _refuse_beside(condition: bool, param: str) -> None:
    if condition:
        raise InvalidParameter(f"'{param}' has no effect on what is asked for beside it; leave it out.", param=param)


def _grammars(
    prefix: str,
    schema: Any,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
) -> list[Grammar]:
    grammars = []
    if schema is not None:
        grammars.append(Grammar("json_schema", _parsed(schema, f"{prefix}json"), f"{prefix}json", whitespace))
    if regex is not None:
        grammars.append(Grammar("regex", regex, f"{prefix}regex"))
    if choice is not None:
        grammars.append(Grammar("choice", tuple(choice), f"{prefix}choice"))
    if grammar is not None:
        grammars.append(Grammar("grammar", grammar, f"{prefix}grammar"))
    return grammars


def _parsed(schema: Any, param: str) -> Any:
    """A schema; clients may send it as a string."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"Invalid '{param}': it is not JSON: {error}.", param=param) from error
