"""`mlxserve completion`: scripts by which a shell completes commands and flags."""

import os
from typing import Annotated

import typer

VARIABLE = "_MLXSERVE_COMPLETE"
"""By which the script asks this program what could come next."""


SHELLS = ("bash", "zsh", "fish")


def _known_shell(name: str) -> str:
    if name not in SHELLS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(SHELLS)}")
    return name


def completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="SHELL", help="bash, zsh or fish.", callback=_known_shell, autocompletion=lambda: list(SHELLS)
        ),
    ],
) -> None:
    """Print a script that lets Tab complete commands and flags.

    bash: add to ~/.bashrc    eval "$(mlxserve completion bash)"

    zsh: add to ~/.zshrc, after compinit    eval "$(mlxserve completion zsh)"

    fish: mlxserve completion fish > ~/.config/fish/completions/mlxserve.fish

    Example: eval "$(mlxserve completion bash)"
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="mlxserve", complete_var=VARIABLE, shell=shell))


def prepare_completion() -> None:
    """Let typer answer where a shell asks: it knows the shells only after this, and importing them takes time."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
