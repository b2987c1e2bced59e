"""Who may import whom, as docs/architecture.md says. Imports inside functions and under TYPE_CHECKING count as well."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mlxserve"

DIRECT = {
    "cli": {"api", "bench"},
    "api": {"engine"},
    "engine": {"scheduler", "runner", "text", "store"},
    "scheduler": {"kv"},
    "kv": {"core"},
    "runner": {"core"},
    "text": {"core"},
    "store": {"core"},
    "core": set(),
    "bench": {"store"},
}
"""The arrows of docs/architecture.md."""

FOR_EVERYONE = {"errors", "config", "blas"}
MLX = {"mlx", "mlx_lm"}
WITHOUT_MLX = {"core", "kv", "scheduler", "text"}
DIALECTS = {"openai", "ollama", "anthropic"}


def below(layer: str) -> set[str]:
    """All layers that can be reached along the arrows."""
    return DIRECT[layer].union(*(below(lower) for lower in DIRECT[layer]))


def imported_modules(file: Path) -> Iterator[str]:
    """Full names of the modules a file imports; `from a import b` gives both a and a.b."""
    module = file.relative_to(PACKAGE.parent).with_suffix("").parts
    package = module[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*start, *(node.module.split(".") if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [(file.relative_to(PACKAGE), name) for file in FILES for name in imported_modules(file)]
LAYERS = sorted({path.parts[0] for path, _ in IMPORTS if len(path.parts) > 1})


def test_the_walk_sees_the_package() -> None:
    assert (Path("config.py"), "mlxserve.errors") in IMPORTS
    assert {"cli", "core", "engine"} <= set(LAYERS)
    assert set(LAYERS) <= set(DIRECT), "a new folder needs its place in docs/architecture.md and here"


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down_only(layer: str) -> None:
    allowed = below(layer) | {layer} | FOR_EVERYONE
    internal = [
        (path, name.split(".")[1])
        for path, name in IMPORTS
        if path.parts[0] == layer and name.startswith("mlxserve.") and not name.startswith("mlxserve.__")
    ]
    assert [(str(path), target) for path, target in internal if target not in allowed] == []


def test_what_everyone_imports_imports_nothing_else() -> None:
    shared = {f"{name}.py" for name in FOR_EVERYONE}
    targets = {name.split(".")[1] for path, name in IMPORTS if str(path) in shared and name.startswith("mlxserve.")}
    assert targets <= FOR_EVERYONE


@pytest.mark.parametrize("layer", sorted(WITHOUT_MLX))
def test_layers_without_mlx(layer: str) -> None:
    roots = [(str(path), name) for path, name in IMPORTS if path.parts[0] == layer and name.split(".")[0] in MLX]
    assert roots == []


def test_dialects_are_strangers() -> None:
    for path, name in IMPORTS:
        if path.parts[0] == "api" and path.parts[1] in DIALECTS:
            others = {f"mlxserve.api.{dialect}" for dialect in DIALECTS - {path.parts[1]}}
            assert not any(name == other or name.startswith(f"{other}.") for other in others), (path, name)
