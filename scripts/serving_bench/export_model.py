"""Write a model as a folder in mlx-lm's format, with the very weights mlxserve computes with, and describe it.

Usage: python export_model.py MODEL THREADS FOLDER

Writes FOLDER/description.json too, see `Description`. A process of its own, so that the client holds no model.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxserve.store.loader import LoadedModel

DESCRIPTION = "description.json"


@dataclass(frozen=True, slots=True)
class Description:
    name: str
    file: str
    """What mlxserve loads: a folder, or a .gguf file."""
    architecture: str
    num_parameters: int
    quantization: str
    """How the file holds the weights."""
    computed_in: str
    """How mlxserve and mlx-lm hold them in memory."""
    device: str
    blas: str

    @classmethod
    def read(cls, folder: Path) -> "Description":
        return cls(**json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))


def main() -> None:
    name, threads, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    from mlxserve import blas

    info = blas.preload(threads)
    from mlxserve.errors import MlxserveError
    from mlxserve.runner import device
    from mlxserve.store import hub, loader
    from mlxserve.store.registry import Registry

    found = device.detect()
    try:
        source = Registry().resolve(name, allow_paths=True)
        file = hub.ensure_local(source)
        loaded = loader.load(file, name=source.name, dtype_policy=found.dtype_policy)
    except MlxserveError as error:
        sys.exit(f"Error: {error}")
    export(loaded, folder)
    description = Description(
        name=loaded.name,
        file=str(file),
        architecture=loaded.architecture,
        num_parameters=loaded.num_parameters,
        quantization=loaded.quantization,
        computed_in="float32" if found.dtype_policy == "float32" else "the file's own types",
        device=found.name,
        blas=f"{info.name} {info.version}, {info.threads} threads" if info else "MLX's own",
    )
    (folder / DESCRIPTION).write_text(json.dumps(dataclasses.asdict(description)), encoding="utf-8")


def export(loaded: "LoadedModel", folder: Path) -> None:
    """Weights, config, tokenizer and chat template, such that mlx_lm.load(folder) gives the same model."""
    from mlx_lm.utils import save_config, save_model

    save_model(folder, loaded.model)
    # The loader may have dequantised the weights, or quantised them where the file's config says nothing of it.
    config = {key: value for key, value in loaded.config.items() if not key.startswith("quantization")}
    if quantization := _quantization(loaded.model):
        config["quantization"] = quantization
    save_config(config, folder / "config.json")
    loaded.tokenizer.save_pretrained(folder)


def _quantization(model: Any) -> dict[str, Any]:
    """mlx-lm's `quantization`: each quantised layer by its path, and the first one's figures for all others."""
    layers = {
        path: {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        for path, layer in model.named_modules()
        if "scales" in layer
    }
    return {**next(iter(layers.values())), **layers} if layers else {}


if __name__ == "__main__":
    main()
