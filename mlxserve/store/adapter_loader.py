"""Models over the arrays of a base: copies of its tree of modules, with or without an adapter's layers.

An engine tunes the modules of the model it gets, so each has a tree of its own; arrays, which are values in MLX, are
the base's.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import load_adapters

from mlxserve.core.pieces import Pieces
from mlxserve.store.adapter import Adapter
from mlxserve.store.loader import DtypePolicy, LoadedModel

_ARRAYS = ("lora_a", "lora_b", "m")
"""What an adapter's layers have of their own, beside the layer of the base."""


def view(base: LoadedModel, name: str) -> LoadedModel:
    """The base as it was loaded, in modules of its own; it takes no memory for weights."""
    return replace(base, name=name, model=copy_modules(base.model), weight_bytes=0)


def adapt_pieces(base: LoadedModel, adapter: Adapter, name: str, dtype_policy: DtypePolicy) -> Pieces[LoadedModel]:
    """The base with an adapter; `weight_bytes` are those of the adapter alone.

    Raises:
        ModelLoadError: it does not fit this base.
    """
    model = copy_modules(base.model)
    yield
    try:
        load_adapters(model, str(adapter.path))
        # In training its dropout would be at work.
        model.eval()
        own = _own_parameters(model)
        if dtype_policy == "float32":
            own = tree_map(_as_float32, own)
            model.update(own)
        mx.eval(own)
    except Exception as error:  # mlx-lm and mlx raise whatever the files led them to
        raise adapter.unusable(
            f"it does not fit this model ({base.architecture}, {base.num_parameters / 1e6:.0f} M parameters); "
            f"put it on the one it was trained for. {error}",
            name,
        ) from error
    yield
    arrays: list[tuple[str, mx.array]] = tree_flatten(own)
    return replace(
        base,
        name=name,
        model=model,
        # Among what names its KV blocks on disk: `scale` is in no array.
        config={**base.config, "adapter": adapter.config},
        num_parameters=base.num_parameters + adapter.num_parameters,
        weight_bytes=sum(array.nbytes for _, array in arrays),
    )


def copy_modules(model: nn.Module) -> nn.Module:
    """The same modules once more, over the same arrays."""
    copied: nn.Module = _copy(model, {})
    return copied


def _copy(value: Any, done: dict[int, Any]) -> Any:
    """`done`: copies by the id of the original, since a module may be in several places."""
    if isinstance(value, nn.Module):
        if id(value) not in done:
            kind: Any = type(value)
            module = done[id(value)] = kind.__new__(kind)
            module.__dict__.update(value.__dict__)
            module._no_grad = set(value._no_grad)
            for key, each in value.items():
                module[key] = _copy(each, done)
        return done[id(value)]
    if type(value) is dict:
        return {key: _copy(each, done) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(each, done) for each in value)
    return value


def _own_parameters(model: nn.Module) -> Any:
    """Of the layers that an adapter has put in: those that are not the base's."""
    return model.filter_and_map(
        lambda module, key, value: (
            isinstance(value, dict | list) or (key in _ARRAYS and isinstance(value, mx.array) and "lora_a" in module)
        )
    )


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32)
