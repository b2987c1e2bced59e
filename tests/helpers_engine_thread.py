"""Requests on an engine thread: prompts, submitting, and whose a step is."""

from helpers_engine import Client

from mlxserve.core.request import Request
from mlxserve.core.step import ScheduledStep
from mlxserve.engine.engine_thread import EngineHandle, EngineThread


def prompt(first: int, length: int = 20) -> list[int]:
    return list(range(first, first + length))


def submit(thread: EngineThread, handle: EngineHandle, request: Request) -> Client:
    client = Client()
    thread.submit(handle, request, client)
    return client


def ids_of(step: ScheduledStep) -> set[str]:
    return {chunk.request_id for chunk in step.prefill} | {row.request_id for row in step.decode}
