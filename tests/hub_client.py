"""One call of the library, in a process whose hub is HF_ENDPOINT: its result or error as JSON on stdout.

`python tests/hub_client.py '{"method": "pull", "name": "test/model"}'`
"""

import json
import shutil
import sys
import threading
from typing import Any

from mlxserve.engine.library import Library, StoredModel
from mlxserve.errors import MlxserveError
from mlxserve.store.registry import Registry


def call(
    method: str, *, free: int | None = None, threads: int = 1, names: list[str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """`free`: bytes the disk is said to have; `threads`: so many calls at the same time; `names`: one for each,
    in turn."""
    if free is not None:
        usage = shutil.disk_usage("/")._replace(free=free)
        shutil.disk_usage = lambda path: usage  # type: ignore[assignment]
    library = Library(Registry())
    outcomes: list[dict[str, Any]] = []

    def once(**arguments: Any) -> None:
        progress: list[tuple[int, int]] = []
        extra: dict[str, Any] = {"progress": lambda *numbers: progress.append(numbers)} if method == "pull" else {}
        outcome: dict[str, Any] = {"progress": progress}
        try:
            found = getattr(library, method)(**arguments, **extra)
            outcome["result"] = _plain(found)
        except MlxserveError as error:
            outcome |= {"error": type(error).__name__, "message": str(error)}
        outcomes.append(outcome)

    if names is not None:
        for name in names:
            once(name=name)
        return {"outcomes": outcomes}
    if threads == 1:
        once(**arguments)
        return outcomes[0]
    callers = [threading.Thread(target=once, kwargs=arguments) for _ in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return {"outcomes": outcomes}


def _plain(found: Any) -> Any:
    if isinstance(found, list):
        return [_plain(each) for each in found]
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
    print(json.dumps(call(**json.loads(sys.argv[1]))))
