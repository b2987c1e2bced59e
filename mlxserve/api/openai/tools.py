"""The tools of a chat on the wire: what the model may call, and whether it must."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Discriminator, Field, Tag, model_validator

from mlxserve.api.tool_schema import ArgumentsSchema
from mlxserve.api.wire import WireModel
from mlxserve.core.generation import ToolChoice
from mlxserve.errors import InvalidParameter

MAX_TOOLS = 1000

FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:/-]+$")]


class FunctionDefinition(WireModel):
    name: FunctionName
    description: str | None = None
    parameters: ArgumentsSchema | None = None
    """A JSON schema of the arguments, which are an object; None: there are none."""
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(WireModel):
    name: str


class ToolReference(WireModel):
    type: Literal["function"]
    function: FunctionReference


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTools(WireModel):
    type: Literal["function", "allowed_tools"]
    function: FunctionReference | None = None
    """The one tool to call."""
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _what_its_type_says(self) -> Self:
        for name, value in (("function", self.function), ("allowed_tools", self.allowed_tools)):
            param = f"tool_choice.{name}"
            if self.type == name and value is None:
                raise InvalidParameter(
                    f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
                )
            if self.type != name and value is not None:
                raise InvalidParameter(f"'{param}' does not go with the type {self.type!r}; leave it out.", param=param)
        return self


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return ":word"
    return ":object" if isinstance(value, dict) else None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")] | Annotated[ChosenTools, Tag(":object")],
    Discriminator(_kind_of_choice, "choice_type", "Input should be a string or an object"),
]


class ToolFields(Protocol):
    """What the bodies have that can have tools."""

    tools: list[Tool] | None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None
    parallel_tool_calls: bool | None


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools the model is told of, and whether it must call one."""

    tools: tuple[dict[str, Any], ...]
    """As chat templates expect them."""
    params: tuple[str, ...]
    """The client's fields of their parameters."""
    choice: ToolChoice


def offer_of(body: ToolFields) -> Offer:
    """What the fields of a body come to.

    Raises:
        InvalidParameter: two tools of one name, or a choice of what is not there.
    """
    by_name: dict[str, Tool] = {}
    for position, tool in enumerate(body.tools or ()):
        if tool.function.name in by_name:
            param = f"tools[{position}].function.name"
            raise InvalidParameter(f"Invalid '{param}': there are two tools of this name.", param=param)
        by_name[tool.function.name] = tool
    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    match body.tool_choice:
        case "none" | "auto" | "required" as mode:
            if mode == "required" and not by_name:
                raise InvalidParameter("'tool_choice' is required and there are no 'tools'.", param="tool_choice")
        case ChosenTools(function=FunctionReference(name=name)):
            mode = "required"
            _check_known([name], by_name, "tool_choice.function.name")
        case ChosenTools(allowed_tools=AllowedTools() as allowed):
            mode = allowed.mode
            names = [tool.function.name for tool in allowed.tools]
            _check_known(names, by_name, "tool_choice.allowed_tools.tools")
            by_name = {key: tool for key, tool in by_name.items() if key in names}
    positions = {tool.function.name: position for position, tool in enumerate(body.tools or ())}
    return Offer(
        tuple(map(_template_tool, by_name.values())),
        tuple(f"tools[{positions[key]}].function.parameters" for key in by_name),
        ToolChoice(mode, name, body.parallel_tool_calls is not False),
    )


def _check_known(names: Sequence[str], tools: dict[str, Tool], param: str) -> None:
    for name in names:
        if name not in tools:
            raise InvalidParameter(f"Invalid '{param}': no tool is called {name[:128]!r}.", param=param)


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": tool.function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
