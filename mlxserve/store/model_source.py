"""What a model's name stands for: where its files come from, and what goes with them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository on the Hugging Face hub."""

    repo: str
    revision: str = "main"
    gguf: str | None = None
    """Quantisation of the GGUF file that is meant, as its name has it: "Q4_0"; None: the repository's safetensors, or
    without such its best GGUF file."""
    is_adapter: bool = False
    """It holds an adapter and no model."""

    def __str__(self) -> str:
        tag = "" if self.gguf is None else f":{self.gguf}"
        return self.repo + tag + ("" if self.revision == "main" else f"@{self.revision}")


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file inside an installed Python package, which is located and never imported."""

    package: str
    file: str

    def __str__(self) -> str:
        return f"{self.file} in the Python package {self.package}"


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A folder or a .gguf file of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Location = HubRepo | PackageFile | LocalPath


class Weights(NamedTuple):
    """What is computed with: names that stand for the same weights share them in memory, and the engine over them."""

    base: Location
    adapter: Location | None = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a name stands for."""

    name: str
    """The canonical name: the alias in lower case, org/name, or the path."""
    location: Location
    context_length: int | None = None
    """Tokens to serve at most; None: what the model says."""
    sampling: dict[str, float | int] = field(default_factory=dict, hash=False)
    """Values of SamplingParams fields where a request names none."""
    description: str = ""
    system: str | None = None
    """System message of a chat that has none."""
    template: str | None = None
    """Chat template (Jinja) in place of the tokenizer's own."""
    stop: tuple[str, ...] = ()
    """Stop strings of a request that names none."""
    license: str | None = None
    """Name or text of a licence in place of the files' own."""
    adapter: Location | None = None
    """Folder with a LoRA adapter that changes the model at `location`."""

    @property
    def weights(self) -> Weights:
        return Weights(self.location, self.adapter)

    @property
    def adapter_source(self) -> "ModelSource | None":
        """Where the adapter's own files come from, under the name of the whole."""
        return None if self.adapter is None else ModelSource(self.name, self.adapter)
