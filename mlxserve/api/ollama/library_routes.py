"""The endpoints about models on disk. Names only: no path of this machine, but to `create` in folders it is allowed."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.connection import until_disconnect
from mlxserve.api.exchange import HEADERS_AFTER
from mlxserve.api.ndjson import LineStream, line
from mlxserve.api.ollama import models
from mlxserve.api.ollama.body import read
from mlxserve.api.ollama.convert import known_name
from mlxserve.api.ollama.library_schema import CopyRequest, CreateRequest, DeleteRequest, PullRequest, ShowRequest
from mlxserve.api.ollama.pull import SUCCESS, Pull
from mlxserve.errors import InvalidParameter

if TYPE_CHECKING:
    from mlxserve.engine.library import Library
    from mlxserve.engine.model_host import ModelHost

MAX_PULLS = 2
"""Downloads at a time; more wait."""


class LibraryRoutes:
    def __init__(self, host: "ModelHost", *, max_body_bytes: int, allow_pull: bool, model_dirs: Sequence[Path]) -> None:
        """`model_dirs`: folders that `create` may take models from."""
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._allow_pull = allow_pull
        self._model_dirs = model_dirs
        # Not asyncio's threads: a download that hangs would keep models from being loaded.
        self._downloads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="mlxserve-pull")

    def routes(self) -> list[Route]:
        return [
            Route("/api/tags", self.tags),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
            Route("/api/copy", self.copy, methods=["POST"]),
            Route("/api/create", self.create, methods=["POST"]),
            Route("/api/push", self.refuse_upload, methods=["POST"]),
            Route("/api/blobs/{digest}", self.refuse_upload, methods=["POST"]),
        ]

    async def tags(self, request: Request) -> Response:
        stored = await asyncio.to_thread(self._library.models)
        newest_first = sorted(stored, key=lambda model: (-model.modified, model.name))
        return JSONResponse({"models": [models.listed(model) for model in newest_first]})

    async def show(self, request: Request) -> Response:
        body = await read(request, ShowRequest, self._max_body_bytes)
        return JSONResponse(models.shown(await asyncio.to_thread(self._library.show, known_name(body.named))))

    async def pull(self, request: Request) -> Response:
        body = await read(request, PullRequest, self._max_body_bytes)
        if not self._allow_pull:
            raise HTTPException(
                403, "This server downloads nothing for its clients; set allow_pull, or run: mlxserve pull"
            )
        pull = Pull(self._library, known_name(body.named), self._downloads)
        try:
            if body.stream is False:
                await until_disconnect(request.receive, pull.wait())
                return JSONResponse(SUCCESS)
            # What fails at once, as a name that is none, has a status of its own.
            await pull.wait(HEADERS_AFTER)
        except BaseException:
            pull.cancel()
            raise
        return LineStream(pull.lines(), on_close=pull.cancel)

    async def delete(self, request: Request) -> Response:
        body = await read(request, DeleteRequest, self._max_body_bytes)
        await asyncio.to_thread(self._library.remove, known_name(body.named), self._host.locations())
        return Response()

    async def copy(self, request: Request) -> Response:
        body = await read(request, CopyRequest, self._max_body_bytes)
        await asyncio.to_thread(self._library.copy, known_name(body.source), known_name(body.destination))
        return Response()

    async def create(self, request: Request) -> Response:
        body = await read(request, CreateRequest, self._max_body_bytes)
        if body.parameters is not None:
            body.parameters.log_unused(request.state.request_id)
        base, is_path = known_name(body.base), _looks_like_path(body.base)
        if is_path:
            base = await asyncio.to_thread(self._allowed_path, body.base)
        await asyncio.to_thread(
            self._library.create,
            known_name(body.named),
            base,
            system=body.system,
            template=body.template,
            parameters=None if body.parameters is None else body.parameters.as_parameters(),
            license=body.license,
            allow_paths=is_path,
        )
        if body.stream is False:
            return JSONResponse(SUCCESS)
        return Response(line({"status": "creating model"}) + line(SUCCESS), media_type="application/x-ndjson")

    async def refuse_upload(self, request: Request) -> Response:
        raise HTTPException(501, "This server takes no uploads and sends no models to a registry.")

    @property
    def _library(self) -> "Library":
        return self._host.library

    def _allowed_path(self, path: str) -> str:
        """Where a path leads, links followed.

        Raises:
            InvalidParameter: it is not in one of the folders that are allowed, or nothing is there. Which of them is
                not told: it would say what files this machine has.
        """
        refusal = InvalidParameter(
            "'from' is a path, and nothing can be taken from there: it must be an absolute one of a folder or .gguf "
            "file in one of the folders of the setting model_dirs.",
            param="from",
        )
        try:
            found = Path(path).resolve(strict=True)
            folders = [folder.expanduser().resolve() for folder in self._model_dirs]
        except (OSError, ValueError, RuntimeError):
            raise refusal from None
        if not Path(path).is_absolute() or not any(found.is_relative_to(folder) for folder in folders):
            raise refusal
        return str(found)


def _looks_like_path(base: str) -> bool:
    return base.startswith(("/", ".", "~"))
