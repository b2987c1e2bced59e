"""How a command's help page shows its arguments: `MODEL`, `[TEXT]`, `MODEL...`, without types of Python."""

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperOption


class Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        names = [_usage_name(param) for param in self.get_params(ctx) if isinstance(param, TyperArgument)]
        return [self.options_metavar or "", *names]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = self.get_params(ctx)
        # An argument without a help text is explained by the text above.
        arguments = [(_name(param), param.help) for param in params if isinstance(param, TyperArgument) and param.help]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [param.get_help_record(ctx) for param in params if isinstance(param, TyperOption)]
        with formatter.section("Options"):
            formatter.write_dl([each for each in options if each is not None])


def _name(argument: TyperArgument) -> str:
    return f"{argument.metavar}{'...' if argument.nargs != 1 else ''}"


def _usage_name(argument: TyperArgument) -> str:
    return _name(argument) if argument.required else f"[{_name(argument)}]"
