"""Calls of the library in a process whose hub is HF_ENDPOINT: their results or errors as JSON on stdout.

`python tests/hub_client.py '[{"method": "pull", "name": "test/model"}]'`
"""

import json
import shutil
import sys
import threading
from dataclasses import asdict
from typing import Any

from mlxserve.engine.library import Library, StoredModel
from mlxserve.errors import MlxserveError
from mlxserve.store.fit import Fit
from mlxserve.store.registry import Registry

library = Library(Registry())


def call(method: str, *, free: int | None = None, gives_up: bool = False, **arguments: Any) -> dict[str, Any]:
    """`free`: bytes the disk is said to have; `gives_up`: wants a download no more when some of it is here."""
    if free is not None:
        usage = shutil.disk_usage("/")._replace(free=free)
        shutil.disk_usage = lambda path: usage  # type: ignore[assignment]
    progress: list[tuple[int, int]] = []
    cancelled = threading.Event()

    def note(num_bytes: int, total: int) -> None:
        progress.append((num_bytes, total))
        if gives_up and num_bytes > 0:
            cancelled.set()

    extra: dict[str, Any] = {"progress": note, "cancelled": cancelled} if method == "pull" else {}
    try:
        return {"result": _plain(getattr(library, method)(**arguments, **extra)), "progress": progress}
    except MlxserveError as error:
        if gives_up:
            print("gave up", file=sys.stderr, flush=True)
        return {"error": type(error).__name__, "message": str(error)}


def call_at_once(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda each: outcomes.append(call(**each)), args=(each,)) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _plain(found: Any) -> Any:
    if isinstance(found, list):
        return [_plain(each) for each in found]
    if isinstance(found, Fit):
        return {"weights": found.weight_bytes, "caches": [asdict(each) for each in found.caches]}
    if isinstance(found, StoredModel):
        return {
            "name": found.name,
            "path": str(found.path),
            "size": found.size,
            "license": found.license,
            "num_parameters": found.num_parameters,
            "quantization": found.quantization,
            "capabilities": found.capabilities,
            "digest": found.digest,
        }
    return found


if __name__ == "__main__":
    calls = json.loads(sys.argv[1])
    print(json.dumps(call_at_once(calls) if sys.argv[2:] == ["at-once"] else [call(**each) for each in calls]))
