"""Every error mlxserve raises on purpose.

    MlxserveError
    |-- ConfigError                 a setting has an impossible value
    |-- ModelError
    |   |-- ModelNotFound           no such model here
    |   |-- ModelLoadError          the files are there and cannot be used
    |   |   `-- ModelTooLarge       they do not fit into this machine's memory; carries both numbers
    |   |-- ModelInUse              it cannot be removed or written over: somebody needs it
    |   `-- DownloadError           the hub did not give the files
    |       |-- RepositoryNotFound  it has no such repository or revision, or hides it
    |       |-- AccessDenied        it gives them only to who may have them
    |       |-- UnusableRepository  what it has cannot be used here
    |       `-- DownloadCancelled   nobody wants them any more
    |-- RequestError                this request is wrong; `param` names the field
    |   |-- InvalidParameter
    |   |-- ContextLengthExceeded   prompt (plus answer) does not fit; carries both numbers
    |   `-- RequestNotFound         no request of this id is remembered
    |-- CapacityError               nothing is wrong with the request, there is no room now
    |   `-- QueueFull               carries retry_after in seconds
    |-- BenchError                  a measurement cannot be made, or would not mean what it seems to
    |   |-- BenchOptionError        an option has a wrong value, or contradicts another
    |   `-- TargetError             the server that is measured cannot be reached, refused or broke off
    |-- RequestTimeout              the request's deadline passed
    |-- RequestCancelled            the client went away or the server is stopping
    `-- EngineError                 computing this request failed
        `-- EngineDead              the engine stopped; nothing can be computed until it is rebuilt

Messages are written for the person who reads them and say what to do next.
"""


class MlxserveError(Exception):
    """Base of all errors above."""


class ConfigError(MlxserveError):
    """A setting has an impossible value; the message names the setting and where it came from."""


class ModelError(MlxserveError):
    """A model cannot be had; `model` is its name as the user wrote it."""

    def __init__(self, message: str, *, model: str) -> None:
        super().__init__(message)
        self.model = model


class ModelNotFound(ModelError):
    """No model goes by this name."""


class ModelLoadError(ModelError):
    """The files exist and cannot be used; the message names the file and the reason."""


class ModelTooLarge(ModelLoadError):
    """The model needs `needed` bytes of memory and may take `limit`."""

    def __init__(self, message: str, *, model: str, needed: int, limit: int) -> None:
        super().__init__(message, model=model)
        self.needed = needed
        self.limit = limit


class ModelInUse(ModelError):
    """The model cannot be removed: it is loaded, or another name needs its files."""


class DownloadError(ModelError):
    """The hub did not give the files."""


class RepositoryNotFound(DownloadError):
    """The hub has no such repository or revision, or does not show it to us."""


class AccessDenied(DownloadError):
    """The hub gives the files only after a login, or when their licence was accepted."""


class UnusableRepository(DownloadError):
    """What the repository holds cannot be used; trying again does not help."""


class DownloadCancelled(DownloadError):
    """Whoever asked for the download gave it up; what has come of it is kept."""


class RequestError(MlxserveError):
    """The request is wrong. `param` is the field at fault in the wire format's own name."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """A field is missing, of the wrong type, or out of range."""


class ContextLengthExceeded(RequestError):
    """The prompt (plus the requested answer) does not fit into `limit` tokens."""

    def __init__(self, message: str, *, num_tokens: int, limit: int, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.limit = limit


class RequestNotFound(RequestError):
    """No request of this id is remembered."""


class CapacityError(MlxserveError):
    """There is no room now; trying again later can succeed."""


class QueueFull(CapacityError):
    """The waiting queue is at its bound."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BenchError(MlxserveError):
    """A measurement cannot be made, or two of them not be compared."""


class BenchOptionError(BenchError):
    """An option of the command has a wrong value, or contradicts another one."""


class TargetError(BenchError):
    """The server that is measured cannot be reached, refused a request, broke a stream off or did not answer in time.

    `status` is that of its answer, None without one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RequestTimeout(MlxserveError):
    """The request's deadline passed before it finished."""


class RequestCancelled(MlxserveError):
    """The request was cancelled: its client went away, or the server is stopping."""


class EngineError(MlxserveError):
    """Computing the request failed; the engine goes on."""


class EngineDead(EngineError):
    """The engine stopped; every waiting request is told so."""
