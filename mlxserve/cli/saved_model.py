"""`/save`: a model, a system message and parameters under a name of their own."""

from typing import Any


def save_model(name: str, base: str, *, system: str | None, parameters: dict[str, Any]) -> object:
    """Keep it as an alias of the user's. It blocks.

    Raises:
        MlxserveError: the name or a parameter cannot be kept.
    """
    # Not at the top: it is slow to import, and most conversations save nothing.
    from mlxserve.engine.library import Library
    from mlxserve.store.registry import Registry

    return Library(Registry()).create(name, base, system=system, parameters=parameters, allow_paths=True)
