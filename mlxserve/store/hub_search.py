"""Searching the hub for models that MLX runs."""

from dataclasses import dataclass
from typing import Any

from mlxserve.errors import DownloadError
from mlxserve.store.hub_errors import describe_failure

TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class HubModel:
    name: str
    downloads: int
    """In the last 30 days."""
    size: int | None
    """Bytes of the whole repository, where the hub tells."""


def search(text: str, limit: int) -> list[HubModel]:
    """MLX repositories with `text` in their name, those of most downloads first.

    Raises:
        DownloadError: the hub does not answer.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    # HfApi.list_models tries again and again for half a minute where there is no network.
    parameters: dict[str, Any] = {"filter": "mlx", "search": text, "sort": "downloads", "limit": limit}
    query: dict[str, Any] = {**parameters, "expand[]": ["downloads", "usedStorage"]}
    try:
        reply = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=query, headers=build_hf_headers(), timeout=TIMEOUT
        )
        hf_raise_for_status(reply)
        return [HubModel(each["id"], each.get("downloads", 0), each.get("usedStorage")) for each in reply.json()]
    except Exception as error:  # the hub's client raises those of its HTTP library, another in each version
        raise DownloadError(describe_failure(f"searching {text!r}", error), model=text) from error
