"""Bodies of requests as Ollama's clients send them."""

from typing import TypeVar

from starlette.requests import Request

from mlxserve.api.wire import WireModel, read_body

# What curl says of a body it is given with -d, as in all of Ollama's examples. A web page could send it without asking,
# and gets nowhere: its Origin is checked.
MEDIA_TYPES = ("application/json", "application/x-www-form-urlencoded")

Schema = TypeVar("Schema", bound=WireModel)


async def read(request: Request, schema: type[Schema], max_bytes: int) -> Schema:
    """The body of a request. Raises as read_body()."""
    return await read_body(request, schema, max_bytes, media_types=MEDIA_TYPES)
