"""`mlxserve completion`: scripts by which a shell completes commands and flags."""

import os
from typing import Annotated, Literal

import typer

VARIABLE = "_MLXSERVE_COMPLETE"
"""By which the script asks this program what could come next."""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", hidden=True)],
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
