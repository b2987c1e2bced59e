"""The response object: what was asked, how it went, and what came of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve.api.failures import describe
from mlxserve.api.openai.responses.schema import ResponseRequest
from mlxserve.core.generation import Finished, Usage
from mlxserve.core.request import FinishReason
from mlxserve.errors import CapacityError, ContextLengthExceeded, RequestError


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything of a response that does not depend on the answer."""

    body: ResponseRequest
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def begun(self) -> dict[str, Any]:
        return self._response("in_progress", [])

    def finished(self, output: Sequence[dict[str, Any]], finished: Finished) -> dict[str, Any]:
        is_whole = finished.reason is not FinishReason.LENGTH
        response = self._response("completed" if is_whole else "incomplete", output)
        response["incomplete_details"] = None if is_whole else {"reason": "max_output_tokens"}
        response["completed_at"] = int(time.time()) if is_whole else None
        response["usage"] = usage_object(finished.usage)
        return response

    def failed(self, output: Sequence[dict[str, Any]], error: Exception) -> dict[str, Any]:
        response = self._response("failed", output)
        response["error"] = {"code": _code(error), "message": describe(error).message}
        return response

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": _wire(body.reasoning) or {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | (_wire(body.text) or {}),
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else _wire(body.tool_choice) or "auto",
            "tools": [_wire(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            "background": False,
        }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
    }


def _wire(part: Any) -> Any:
    """A part of the request as the client sent it."""
    return None if part is None else part.model_dump(by_alias=True, exclude_none=True)


def _code(error: Exception) -> str:
    """Why a response failed, in OpenAI's words, and for full contexts in the one that Codex looks for."""
    if isinstance(error, ContextLengthExceeded):
        return "context_length_exceeded"
    if isinstance(error, RequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, CapacityError) else "server_error"
