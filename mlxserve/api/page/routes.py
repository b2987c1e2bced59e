"""Serves the page's files from memory."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"

# Machines map .js to all sorts of things, and a browser runs no module that comes as text/plain.
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

# Nothing from elsewhere, nothing inline, no frame around the page, and no string ever parsed as HTML by a script.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    # A page must never run with half of its modules from another version: ask each time, and get a 304.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


class PageRoutes:
    """`/` is index.html; every other file is `/page/NAME`."""

    def __init__(self, files: dict[str, StaticFile]) -> None:
        self._files = {("/" if name == "index.html" else f"/page/{name}"): file for name, file in files.items()}

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._files)

    def routes(self) -> list[Route]:
        return [Route(path, self.get_file) for path in sorted(self._files)]

    async def get_file(self, request: Request) -> Response:
        file = self._files[request.scope["path"]]
        headers = {**HEADERS, "etag": file.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def read_files(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """All files of the page by name."""
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix in MEDIA_TYPES):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:32]
        files[path.name] = StaticFile(content, MEDIA_TYPES[path.suffix], f'"{digest}"')
    return files
