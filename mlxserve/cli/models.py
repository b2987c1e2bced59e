"""`mlxserve list`, `show` and `search`: the models of this machine, and of the hub."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli import console, logs
from mlxserve.cli.options import Json
from mlxserve.errors import DownloadError, ModelNotFound

if TYPE_CHECKING:
    from mlxserve.engine.library import Library
    from mlxserve.store.fit import Fit


def open_library() -> "Library":
    """The models of this machine, by their names in models.toml."""
    # Not at the top: --help needs none of it.
    from mlxserve.engine.library import Library
    from mlxserve.store.registry import Registry

    return Library(Registry())


def list_models(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only names that begin with it.")] = None,
    json: Json = False,
) -> None:
    """List the models of this machine. Example: mlxserve list --json"""
    logs.configure("warning")
    console.make_stdout_lenient()
    library = open_library()
    from mlxserve.cli import model_view

    models = [model for model in library.models() if model.name.lower().startswith((text or "").lower())]
    if json:
        model_view.print_json([model_view.as_json(model) for model in models])
        return
    print(model_view.models_table(models))
    if not models and not text:
        names = ", ".join(sorted(library.registry.aliases))
        console.notice(f"No models here yet. mlxserve pull NAME fetches one: {names}, or any org/name of the hub.")


def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, folder or .gguf file.")],
    fit: Annotated[bool, typer.Option("--fit", help="Whether and how it fits into memory.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Only the chat template.")] = False,
    license: Annotated[bool, typer.Option("--license", help="Only the licence.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Only the default parameters.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Only the system message.")] = False,
    json: Json = False,
) -> None:
    """Show what is known of a model. Example: mlxserve show qwen3-4b --fit"""
    if sum((fit, template, license, parameters, system)) > 1:
        raise typer.BadParameter("choose one of --fit, --template, --license, --parameters and --system")
    console.make_stdout_lenient()
    library = open_library()
    from mlxserve.cli import model_view

    if fit:
        fitting = _fit(library, model)
        if json:
            model_view.print_json(model_view.fit_as_json(fitting))
        else:
            print(model_view.fit_report(fitting))
        return
    found = library.show(model, allow_paths=True)
    only: dict[str, Any] = {}
    if template:
        only["template"] = found.template
    elif license:
        only["license"] = found.license
    elif parameters:
        only["parameters"] = found.parameters
    elif system:
        only["system"] = found.system
    if json:
        model_view.print_json(only or {**model_view.as_json(found), "template": found.template})
    elif only:
        print(model_view.parameters(found) if parameters else next(iter(only.values())) or "")
    else:
        print(model_view.details(found))


def _fit(library: "Library", model: str) -> "Fit":
    """How a model fits; one that is not here by what the hub says, which a line on stderr tells."""
    try:
        return library.fit(model, allow_paths=True)
    except ModelNotFound as not_here:
        try:
            with console.spinner("asking the hub"):
                found = library.fit_of_remote(model)
        except (ModelNotFound, DownloadError) as error:
            # What the hub's client raised is its cause: without an answer there is nothing to add.
            if isinstance(error, ModelNotFound) or error.__cause__ is not None:
                raise not_here from None
            raise
    console.notice(f"{model} is not on this machine; this is what the hub says of its files.")
    return found


def search(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="Words of the name.")],
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Most results.")] = 20,
    json: Json = False,
) -> None:
    """Search the hub for MLX models. Example: mlxserve search qwen3 4bit"""
    console.make_stdout_lenient()
    from mlxserve.cli import model_view
    from mlxserve.store import hub_search

    with console.spinner("searching the hub"):
        found = hub_search.search(" ".join(text), limit)
    if json:
        model_view.print_json([{"name": each.name, "downloads": each.downloads, "size": each.size} for each in found])
        return
    rows = [("NAME", "SIZE", "DOWNLOADS")]
    rows += [(each.name, model_view.size(each.size) if each.size else "-", f"{each.downloads:,}") for each in found]
    print(model_view.table(rows))
    if not found:
        console.notice(f"No MLX model of the hub has {' '.join(text)!r} in its name.")
