"""Adapters of random weights for tiny checkpoints, saved as mlx-lm's training saves them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def save(
    folder: Path,
    checkpoint: Path,
    *,
    seed: int = 1,
    kind: str = "lora",
    num_layers: int = 2,
    rank: int = 4,
    scale: float = 2.0,
    keys: list[str] | None = None,
) -> Path:
    """An adapter whose part in the answers is as large as the base's."""
    model, _ = load_model(checkpoint)
    model.freeze()
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.5}
    if keys is not None:
        parameters["keys"] = keys
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    key = mx.random.key(seed)

    def random_weight(array: mx.array) -> mx.array:
        nonlocal key
        key, this = mx.random.split(key)
        noise = mx.random.normal(array.shape, key=this)
        return noise / array.shape[-1] ** 0.5 if array.ndim > 1 else array * (1.0 + 0.3 * noise)

    arrays = dict(tree_flatten(tree_map(random_weight, model.trainable_parameters())))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters}
    # mlx-lm writes all arguments of its training.
    training = {"model": str(checkpoint), "iters": 1000, "learning_rate": 1e-5, "lr_schedule": None}
    (folder / "adapter_config.json").write_text(json.dumps(training | config))
    return folder
