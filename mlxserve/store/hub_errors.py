"""What the hub's client raises, in words that say what to do."""

import errno
import textwrap

from mlxserve.errors import AccessDenied, DownloadError, RepositoryNotFound
from mlxserve.store.model_source import HubRepo

MAX_REASON_LENGTH = 200
LOGIN = "log in with: hf auth login"


def download_error(name: str, location: HubRepo, error: Exception) -> DownloadError:
    """The error for what the hub's client or the system raised."""
    result = _download_error(name, location, error)
    result.__cause__ = error
    return result


def _download_error(name: str, location: HubRepo, error: Exception) -> DownloadError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            problem = f"{location} asks for its licence to be accepted: do so on its page, then {LOGIN}"
            return AccessDenied(problem, model=name)
        case RepositoryNotFoundError():
            problem = f"{location} is not on the hub, or is private: check the spelling, or {LOGIN}"
            return RepositoryNotFound(problem, model=name)
        case RevisionNotFoundError():
            problem = f"{location.repo} has no revision {location.revision!r} on the hub"
            return RepositoryNotFound(problem, model=name)
    if _status(error) in (401, 403):
        problem = f"the hub does not let this account have {location} (status {_status(error)}): {LOGIN}"
        return AccessDenied(problem, model=name)
    return DownloadError(_of_system(location, error) or describe_failure(f"downloading {location}", error), model=name)


def describe_failure(doing: str, error: Exception) -> str:
    """What to do when the hub cannot be reached, or does not do what it should."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled) or "Connect" in type(error).__name__:
        return (
            f"{doing} failed, the hub cannot be reached ({_reason(error)}); "
            "connect to the network (and unset HF_HUB_OFFLINE if it is set) and try again"
        )
    status = _status(error)
    if status == 401:
        return f"{doing} failed, the hub knows no such token (status 401): {LOGIN}, or unset HF_TOKEN"
    if status == 429:
        return f"{doing} failed, the hub had too many requests from here (status 429); wait some minutes, or {LOGIN}"
    if status is not None and status >= 500:
        return f"{doing} failed, the hub is out of order (status {status}); try again later, what has come is kept"
    return f"{doing} failed ({_reason(error)}); try again, what has come is kept"


def _of_system(location: HubRepo, error: Exception) -> str | None:
    """What to do where this machine is at fault."""
    from huggingface_hub.constants import HF_HUB_CACHE

    match getattr(error, "errno", None) if isinstance(error, OSError) else None:
        case errno.ENOSPC | errno.EDQUOT:
            return (
                f"the disk is full while downloading {location}; make room or set HF_HOME to a larger disk, then try "
                "again"
            )
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR:
            return (
                f"{location} cannot be kept in {HF_HUB_CACHE} ({_reason(error)}); make that folder writable, or set "
                "HF_HOME to one that is"
            )
        case errno.ENOENT:
            return f"files of {location} were removed while it was downloaded; pull it again"
    return None


def _status(error: Exception) -> int | None:
    """Of the hub's answer, if there was one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _reason(error: BaseException | None) -> str:
    """One line; the hub's client writes several, with request ids."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_LENGTH, placeholder=" ...")
