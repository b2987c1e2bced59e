"""What is known of a loaded model beside its weights."""

from dataclasses import dataclass

from mlxserve.core.generation import GenerationRequest
from mlxserve.core.request import Pooling, Speculation


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a loaded model beside its weights."""

    name: str
    context_length: int
    """Tokens a sequence may have: the model's own length, or less where settings or memory say so."""
    architecture: str
    num_parameters: int
    quantization: str
    default_sampling: dict[str, float | int]
    load_seconds: float
    created: int
    """Unix time of the load."""
    speculation: frozenset[Speculation] = frozenset({Speculation.AUTO, Speculation.OFF})
    """The kinds a request may ask for."""
    can_embed: bool = False
    pooling: Pooling = Pooling.LAST
    """What its embeddings are made by."""
    capabilities: tuple[str, ...] = ("completion",)
    """As text/capabilities.py names them."""
    system: str | None = None
    """System message of a chat that has none."""
    format: str = "safetensors"
    """Of its files: gguf or safetensors."""
    stop: tuple[str, ...] = ()
    """Stop strings of a request that names none."""

    def limit_of(self, request: GenerationRequest) -> int:
        """Tokens that the request's sequence may have."""
        asked = request.context_length
        return self.context_length if asked is None else min(asked, self.context_length)
