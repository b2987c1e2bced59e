"""What a model of the hub is before it is downloaded: from its config and the headers of its weights."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlxserve.errors import DownloadError
from mlxserve.store.download_plan import make_plan
from mlxserve.store.hub_errors import download_error
from mlxserve.store.model_facts import ModelFacts, facts_of_tensors
from mlxserve.store.model_source import HubRepo
from mlxserve.store.safetensors_header import TensorInfo

TIMEOUT = 10.0


def read_remote_facts(name: str, location: HubRepo) -> ModelFacts:
    """As read_facts() would give them after a download, but for chat template, licence and tokens.

    Raises:
        DownloadError: the hub does not answer, or has no safetensors there that can be used.
    """
    try:
        plan = make_plan(name, location)
        weights = [file.name for file in plan.files if fnmatch(file.name, "model*.safetensors")]
        if not weights:
            raise DownloadError(f"{location} has no safetensors, whose sizes can be read from afar", model=name)
        tensors: dict[str, TensorInfo] = {}
        for file in weights:
            tensors |= _tensors(location.repo, plan.commit, file)
        config = _config(location.repo, plan.commit)
    except DownloadError:
        raise
    except Exception as error:  # the hub's client raises those of its HTTP library, another in each version
        raise download_error(name, location, error) from error
    return facts_of_tensors(tensors, config, path=Path(str(location)), size=plan.total, modified=0.0, digest="")


def _tensors(repo: str, commit: str, file: str) -> dict[str, TensorInfo]:
    from huggingface_hub import HfApi

    header = HfApi().parse_safetensors_file_metadata(repo, file, revision=commit)
    return {
        name: TensorInfo(str(tensor.dtype), tuple(tensor.shape), tensor.data_offsets[1] - tensor.data_offsets[0])
        for name, tensor in header.tensors.items()
    }


def _config(repo: str, commit: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    # Not with hf_hub_download: a file in the cache would make it look as if the model's download had begun.
    url = hf_hub_url(repo, "config.json", revision=commit)
    reply = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT, follow_redirects=True)
    hf_raise_for_status(reply)
    config = json.loads(reply.content)
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")
    return config
