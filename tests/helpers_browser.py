"""A headless Chromium for the tests of the page, and a server with a fake engine for it to look at."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeHost, serve
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Playwright, expect
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxserve.api.app import create_app
from mlxserve.api.metrics import Metrics
from mlxserve.config import ServerConfig

TIMEOUT = 30_000
"""Milliseconds that something on the page may take: a browser is slow where others use the machine."""
expect.set_options(timeout=TIMEOUT)

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 740}

NO_BROWSER = "no Chromium on this machine; install it, or name one in MLXSERVE_TEST_BROWSER"

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find_browser(playwright: Playwright) -> str | None:
    """The path of a Chromium: one that is named, one that is installed, or Playwright's own."""
    if named := os.environ.get("MLXSERVE_TEST_BROWSER"):
        return named
    installed = [path for path in map(shutil.which, _NAMES) if path is not None]
    others = [path for path in (_MAC, Path(playwright.chromium.executable_path)) if path.is_file()]
    return next(iter([*installed, *map(str, others)]), None)


STAGES = ("front_end", "queue", "prefill", "decode", "delivery")


def debug_request(name: str, state: str, **stages: float) -> dict[str, Any]:
    """A request as GET /debug/requests shows it."""
    spent = {stage: stages.get(stage, 0.0) for stage in STAGES}
    is_done = state == "done"
    return {
        "id": name,
        "model": "fake",
        "state": state,
        "received": time.time() - sum(spent.values()),
        "stages": spent,
        "total": sum(spent.values()),
        "ttft": sum(spent.values()) - spent["decode"] if is_done or state == "decode" else None,
        "num_prompt_tokens": 700,
        "num_cached_tokens": 640 if is_done else 0,
        "num_computed_tokens": 60,
        "num_generated_tokens": 41 if is_done else 0,
        "num_preemptions": 0,
        "priority": 0,
        "outcome": "stop" if is_done else None,
    }


def debug_step(number: int, *, rows: int, prefill: int) -> dict[str, Any]:
    """A step as GET /debug/steps shows it."""
    return {
        "step_id": number,
        "time": time.time() - 0.05 * (120 - number),
        "num_rows": rows,
        "num_chunks": int(prefill > 0),
        "num_prefill_tokens": prefill,
        "num_draft_tokens": 0,
        "budget": 256,
        "predicted": 0.012 + 0.001 * rows + 0.0002 * prefill,
        "measured": 0.011 + 0.0012 * rows + 0.00021 * prefill + 0.002 * (number % 3),
        "requests": [],
    }


@dataclass
class DebugStub:
    """The debug endpoints, saying what a test puts here."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    is_there: bool = True

    def routes(self) -> list[Route]:
        return [
            Route("/debug/requests", self.list_requests),
            Route("/debug/requests/{name}", self.get_request),
            Route("/debug/steps", self.list_steps),
        ]

    async def list_requests(self, request: Request) -> Response:
        return self._answer({"requests": self.requests})

    async def get_request(self, request: Request) -> Response:
        (found,) = [each for each in self.requests if each["id"] == request.path_params["name"]]
        return self._answer({**found, "events": self.events})

    async def list_steps(self, request: Request) -> Response:
        return self._answer({"models": self.models})

    def _answer(self, content: dict[str, Any]) -> Response:
        if not self.is_there:
            raise HTTPException(404)
        return JSONResponse({"now": time.time(), **content})


@dataclass
class Site:
    """A running server, what stands behind it, and the browser that looks at it."""

    address: str
    host: FakeHost
    debug: DebugStub
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)
    """Errors of scripts, and what the browser refused, in all of the site's pages."""

    def open(self, path: str = "/") -> Page:
        page = self.context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)
        page.goto(self.address + path)
        return page

    def _listen(self, message: ConsoleMessage) -> None:
        # A status such as 401 is an answer the page deals with; the browser logs it all the same.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@contextmanager
def open_site(browser: Browser, config: ServerConfig | None = None, **options: Any) -> Iterator[Site]:
    """A server and a browser context of its own; `options` are the context's."""
    host, debug = FakeHost(), DebugStub()
    app = create_app(host, config or ServerConfig(), Metrics())
    app.router.routes[:0] = debug.routes()
    with serve(app) as address:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        try:
            yield Site(address, host, debug, context)
        finally:
            context.close()


def ask(pane: Page | Locator, text: str) -> None:
    pane.get_by_label("Message", exact=True).fill(text)
    pane.get_by_label("Message", exact=True).press("Enter")


def answers(pane: Page | Locator) -> Locator:
    return pane.locator(".message.assistant")


def length(pane: Page | Locator) -> int:
    return len(answers(pane).last.locator(".body").inner_text())


def fill_debug(site: Site) -> None:
    """Three live requests, eight that are done, 120 steps."""
    site.debug.requests = [
        debug_request("chatcmpl-000waits", "queued", front_end=0.02, queue=1.4),
        debug_request("chatcmpl-00prefil", "prefill", front_end=0.02, queue=0.3, prefill=0.8),
        debug_request("chatcmpl-0decodes", "decode", front_end=0.01, queue=0.1, prefill=0.4, decode=2.1, delivery=0.01),
        *(
            debug_request(
                f"chatcmpl-{n:03}done",
                "done",
                front_end=0.02,
                queue=0.1 * n,
                prefill=0.5,
                decode=3.0 - 0.2 * n,
                delivery=0.05,
            )
            for n in range(8)
        ),
    ]
    steps = [debug_step(n, rows=n % 7 + 1, prefill=128 if n % 11 == 0 else 0) for n in range(1, 121)]
    blocks = {"used": 90, "shared": 30, "cached": 60, "max": 256}
    site.debug.models = [{"model": "fake", "num_running": 2, "num_waiting": 1, "blocks": blocks, "steps": steps}]
    site.debug.events = [
        {"time": 100.0, "kind": "received"},
        {"time": 100.02, "kind": "queued"},
        {"time": 101.4, "kind": "cache_hit", "num_tokens": 640},
        *({"time": 101.5 + n / 10, "kind": "token"} for n in range(5)),
    ]
