"""Getting to know a server before it is measured: whether it is compatible, which model, and what it refuses."""

import asyncio
import dataclasses
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from mlxserve.bench import client
from mlxserve.bench.client import Reply, Target
from mlxserve.errors import BenchError, BenchOptionError, TargetError

PROBE_TIMEOUT = 10.0
"""Seconds for an answer that needs no model."""
PROBE_TOKENS = 4
MISSING = (404, 405, 501)
"""Statuses of a path that a server does not have."""
NOT_UNDERSTOOD = (400, 422)
"""Statuses of a server that refuses a field."""


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """A target as requests will go to it, and what was found out about it."""

    target: Target
    software: str
    """What it calls itself, as `mlxserve/0.1.0`."""
    card: dict[str, Any] = field(default_factory=dict)
    """The model's object of /v1/models."""
    first_ttft: float = 0.0
    """Seconds to the first text of the first request: if the model was not loaded, its load is in it."""
    notes: tuple[str, ...] = ()


def parse_url(url: str, api_key: str | None) -> Target:
    """The target of an address, with or without `/v1` at its end.

    Raises:
        BenchError: no http or https address.
    """
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BenchOptionError(
            f"--url {url!r} is no address: {error}; write for example http://127.0.0.1:8080"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BenchOptionError(f"--url {url!r} is no http address; write for example http://127.0.0.1:8080")
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(port, "", {}, parts.hostname, base, api_key, parts.scheme == "https")


async def get_to_know(target: Target, model: str | None) -> KnownTarget:
    """Choose the model, and find out by one small request whether `ignore_eos` and /v1/completions are taken.

    Raises:
        TargetError: it cannot be reached, or is none of an OpenAI-compatible server.
        BenchError: it has several models and none was named.
    """
    reply = await _models(target)
    card = _choose(target, reply, model)
    target = dataclasses.replace(target, model=str(card["id"]), fields={"ignore_eos": True})
    software = reply.headers.get("server") or str(card.get("owned_by") or "a server that does not name itself")
    notes: list[str] = []
    while True:
        try:
            answer = await client.complete(target, "Once upon a time", PROBE_TOKENS)
        except TargetError as error:
            if target.fields and error.status in NOT_UNDERSTOOD:
                target = dataclasses.replace(target, fields={})
                notes.append("It refuses `ignore_eos`: a model may end its answers before the wanted length.")
            elif target.has_completions and error.status in MISSING:
                target = dataclasses.replace(target, has_completions=False)
                notes.append("It has no /v1/completions: prompts go as chat messages, with its chat template around.")
            else:
                raise TargetError(
                    f"{target.url} does not answer a small request for model {target.model!r}: {error}",
                    status=error.status,
                ) from error
        else:
            return KnownTarget(target, software, card, answer.ttft, tuple(notes))


async def _models(target: Target) -> Reply:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            reply = await client.request(target, "GET", "/v1/models")
    except (OSError, TimeoutError) as error:
        reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
        raise TargetError(
            f"no server at {target.url}: {reason}; start one (`mlxserve serve --model MODEL`), or name another "
            "address with --url"
        ) from error
    except (EOFError, ValueError) as error:
        raise TargetError(f"what answers at {target.url} does not speak HTTP: {error}") from error
    if reply.status in (401, 403):
        raise TargetError(
            f"{target.url} answers {reply.status}: set MLXSERVE_API_KEY to its key. It says: {reply.text}",
            status=reply.status,
        )
    return reply


def _choose(target: Target, reply: Reply, model: str | None) -> dict[str, Any]:
    content = reply.json()
    data = content.get("data") if isinstance(content, dict) else None
    cards = [card for card in data if isinstance(card, dict) and card.get("id")] if isinstance(data, list) else None
    if reply.status != 200 or cards is None:
        raise TargetError(
            f"{target.url} is no OpenAI-compatible server: GET /v1/models answers {reply.status} without a list of "
            f"models: {reply.text[:200]}",
            status=reply.status,
        )
    if model is not None:
        # A server may take names that it does not list, as mlx_lm.server does.
        return next((card for card in cards if card["id"] == model), {"id": model})
    loaded = [card for card in cards if card.get("loaded")] or cards
    if len(loaded) != 1:
        names = ", ".join(str(card["id"]) for card in loaded[:20]) or "none"
        raise BenchError(f"{target.url} has {len(loaded)} models; name one with --model: {names}")
    return loaded[0]
