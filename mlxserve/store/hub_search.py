"""Searching the hub for models that MLX runs."""

from dataclasses import dataclass

from mlxserve.errors import DownloadError
from mlxserve.store.download import describe_failure


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
    from huggingface_hub import HfApi

    try:
        found = HfApi().list_models(
            filter="mlx", search=text, sort="downloads", limit=limit, expand=["downloads", "usedStorage"]
        )
        return [HubModel(info.id, info.downloads or 0, getattr(info, "used_storage", None)) for info in found]
    except Exception as error:  # the hub's client raises those of its HTTP library, another in each version
        raise DownloadError(describe_failure(f"searching {text!r}", error), model=text) from error
