"""The tools of a request: functions, alone or in namespaces, and those that only OpenAI's servers have."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlxserve.api.tool_schema import ArgumentsSchema
from mlxserve.api.wire import WireModel, unsupported
from mlxserve.core.generation import ToolChoice
from mlxserve.errors import InvalidParameter

MAX_TOOLS = 1000
SEPARATOR = "__"
"""Between a namespace and a function, in the name that the model knows it by."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionTool(WireModel):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: ArgumentsSchema | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Annotated[Any, unsupported(["direct"])] = None
    is_async: Annotated[Any, unsupported(False), Field(alias="async")] = None


class ForeignTool(WireModel):
    """A tool that clients offer without being asked, and that nobody here could run: the model is not told of it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom", "web_search", "web_search_preview", "image_generation", "tool_search", "local_shell"]


_FOREIGN = ForeignTool.model_fields["type"].annotation.__args__  # type: ignore[union-attr]


def _tool_type(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return ":foreign" if kind in _FOREIGN else f":{kind}" if kind in ("function", "namespace") else None


def _refuse_other_tools(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind not in ("function", "namespace", *_FOREIGN):
        raise PydanticCustomError(
            "unsupported_parameter",
            "tools of type {kind} run on OpenAI's servers and not here; describe a function",
            {"kind": repr(kind[:40])},
        )
    return tool


InnerTool = Annotated[
    Annotated[FunctionTool, Tag(":function")] | Annotated[ForeignTool, Tag(":foreign")],
    Discriminator(_tool_type, "tool_type", "Input should be a function: an object with a type"),
]


class NamespaceTool(WireModel):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[Annotated[InnerTool, BeforeValidator(_refuse_other_tools)]], Field(max_length=MAX_TOOLS, fail_fast=True)
    ]


Tool = Annotated[
    Annotated[FunctionTool, Tag(":function")]
    | Annotated[NamespaceTool, Tag(":namespace")]
    | Annotated[ForeignTool, Tag(":foreign")],
    Discriminator(_tool_type, "tool_type", "Input should be a tool: an object with a type"),
]
Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(_refuse_other_tools)]], Field(max_length=MAX_TOOLS, fail_fast=True)
]


class NamedFunction(WireModel):
    type: Literal["function"]
    name: Name
    namespace: Name | None = None


class AllowedTools(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return ":word"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return {"function": ":function", "allowed_tools": ":allowed"}.get(str(kind))


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[NamedFunction, Tag(":function")]
    | Annotated[AllowedTools, Tag(":allowed")],
    Discriminator(_kind_of_choice, "choice_type", "Input should be none, auto, required, a function, or allowed_tools"),
]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions of a request by the names that the model knows them by."""

    functions: dict[str, FunctionTool]
    namespaces: dict[str, str]
    """Of those that are in one."""
    fields: dict[str, str]
    """Where the client gave each."""
    choice: ToolChoice

    def template_tools(self) -> tuple[dict[str, Any], ...]:
        """As chat templates expect them."""
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.parameters or {"type": "object", "properties": {}},
                },
            }
            for name, tool in self.functions.items()
        )

    def params(self) -> tuple[str, ...]:
        """The client's fields of their parameters, in the order of template_tools()."""
        return tuple(f"{self.fields[name]}.parameters" for name in self.functions)

    def wire_names(self, name: str) -> dict[str, str]:
        """The fields of a call that say which function it is of."""
        if name not in self.namespaces:
            return {"name": name}
        namespace = self.namespaces[name]
        return {"name": self.functions[name].name, "namespace": namespace}


def model_name(name: str, namespace: str | None) -> str:
    """The name that the model knows a function by."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith(SEPARATOR) else SEPARATOR) + name


def toolbox(tools: Sequence[Tool], choice: str | NamedFunction | AllowedTools | None, *, parallel: bool) -> Toolbox:
    """The tools a model is told of, and whether it must call one.

    Raises:
        InvalidParameter: two functions of one name, or a choice of what is not there.
    """
    functions: dict[str, FunctionTool] = {}
    namespaces: dict[str, str] = {}
    fields: dict[str, str] = {}
    for field, namespace, tool in _functions(tools):
        name = model_name(tool.name, namespace)
        if name in functions:
            param = f"{field}.name"
            raise InvalidParameter(f"Invalid '{param}': there are two tools named {name!r}.", param=param)
        functions[name], fields[name] = tool, field
        if namespace is not None:
            namespaces[name] = namespace
    match choice:
        case NamedFunction():
            name = _known(choice, functions, "tool_choice.name")
            return Toolbox(functions, namespaces, fields, ToolChoice("required", name, parallel))
        case AllowedTools():
            allowed = [
                _known(each, functions, f"tool_choice.tools[{index}].name") for index, each in enumerate(choice.tools)
            ]
            functions = {name: tool for name, tool in functions.items() if name in allowed}
            return Toolbox(functions, namespaces, fields, ToolChoice(choice.mode, parallel=parallel))
        case "required":
            if not functions:
                raise InvalidParameter("'tool_choice' is required and there are no functions.", param="tool_choice")
            return Toolbox(functions, namespaces, fields, ToolChoice("required", parallel=parallel))
        case "none":
            return Toolbox(functions, namespaces, fields, ToolChoice("none"))
        case _:
            return Toolbox(functions, namespaces, fields, ToolChoice(parallel=parallel))


def _functions(tools: Sequence[Tool]) -> Iterator[tuple[str, str | None, FunctionTool]]:
    """Each with its field, and its namespace."""
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield f"tools[{index}]", None, tool
        elif isinstance(tool, NamespaceTool):
            for number, each in enumerate(tool.tools):
                if isinstance(each, FunctionTool):
                    yield f"tools[{index}].tools[{number}]", tool.name, each


def _known(asked: NamedFunction, functions: Mapping[str, FunctionTool], param: str) -> str:
    name = model_name(asked.name, asked.namespace)
    if name not in functions:
        raise InvalidParameter(f"Invalid '{param}': no function is called {name!r}.", param=param)
    return name
