"""What the hub's client raises, in words that say what to do."""

import errno
import textwrap

from mlxserve.errors import DownloadError
from mlxserve.store.model_source import HubRepo

MAX_REASON_LENGTH = 200


def download_error(name: str, location: HubRepo, error: Exception) -> DownloadError:
    """The error for what the hub's client or the system raised."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        problem = (
            f"{location} asks for its licence to be accepted: do so on its page, then log in here with: hf auth login"
        )
    elif isinstance(error, RepositoryNotFoundError):
        problem = f"{location} is not on the hub, or is private: check the spelling, or log in with: hf auth login"
    elif isinstance(error, RevisionNotFoundError):
        problem = f"{location.repo} has no revision {location.revision!r} on the hub"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = (
            f"the disk is full while downloading {location}; make room or set HF_HOME to a larger disk, then try again"
        )
    else:
        problem = describe_failure(f"downloading {location}", error)
    result = DownloadError(problem, model=name)
    result.__cause__ = error
    return result


def describe_failure(doing: str, error: Exception) -> str:
    """What to do when the hub cannot be reached, or does not do what it should."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled) or "Connect" in type(error).__name__:
        return (
            f"{doing} failed, the hub cannot be reached ({_reason(error)}); "
            "connect to the network (and unset HF_HUB_OFFLINE if it is set) and try again"
        )
    return f"{doing} failed ({_reason(error)}); try again, what has come is kept"


def _reason(error: BaseException | None) -> str:
    """One line; the hub's client writes several, with request ids."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_LENGTH, placeholder=" ...")
