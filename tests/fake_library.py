"""engine.library.Library without a disk and a network: two models, and what was asked of it."""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from mlxserve.errors import DownloadError, ModelInUse, ModelNotFound

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class StoredModel:
    name: str
    size: int = 88_000_000
    modified: float = 1_700_000_000.5
    digest: str = "c0ffee" + "0" * 58
    format: str = "gguf"
    architecture: str = "llama"
    family: str = "llama"
    num_parameters: int = 134_515_008
    quantization: str = "Q4_K_M"
    context_length: int = 8192
    embedding_length: int | None = 576
    capabilities: tuple[str, ...] = ("completion", "tools")
    license: str | None = "apache-2.0"
    template: str | None = TEMPLATE
    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    adapter: None = None


@dataclass
class FakeLibrary:
    stored: list[StoredModel] = field(
        default_factory=lambda: [
            StoredModel("fake", parameters={"temperature": 0.2, "repetition_penalty": 1.1, "stop": ["<end>", '"']}),
            StoredModel("org/fake-4bit", modified=1_800_000_000.0, format="safetensors", license=None, template=None),
        ]
    )
    remote: dict[str, int] = field(default_factory=lambda: {"org/new": 1000})
    """Bytes of what can be pulled, by name."""
    stall: threading.Event | None = None
    """A pull stops half way until this is set, or it is cancelled."""
    fails_half_way: bool = False
    cancelled: list[str] = field(default_factory=list)
    """Pulls that were given up."""
    created: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of create()."""

    def models(self) -> list[StoredModel]:
        return list(self.stored)

    def show(self, name: str, *, allow_paths: bool = False) -> StoredModel:
        for model in self.stored:
            if model.name == name.lower():
                return model
        raise ModelNotFound(f"{name} is not on this machine", model=name)

    def pull(
        self, name: str, progress: Callable[[int, int], None], cancelled: threading.Event | None = None
    ) -> StoredModel:
        if name not in self.remote:
            raise ModelNotFound(f"no model is called {name!r}", model=name)
        total = self.remote[name]
        progress(total // 2, total)
        while self.stall is not None and not self.stall.wait(0.005):
            if cancelled is not None and cancelled.is_set():
                self.cancelled.append(name)
                raise DownloadError(f"the download of {name} was given up", model=name)
        if self.fails_half_way:
            raise DownloadError("the connection broke; try again", model=name)
        progress(total, total)
        self.stored.append(StoredModel(name, size=total))
        return self.stored[-1]

    def remove(self, name: str, loaded: Collection[str] = ()) -> int:
        model = self.show(name)
        if model.name in loaded:
            raise ModelInUse(f"{name} is loaded; stop it first: mlxserve stop {name}", model=name)
        self.stored.remove(model)
        return model.size

    def copy(self, source: str, destination: str) -> StoredModel:
        self.stored.append(replace(self.show(source), name=destination))
        return self.stored[-1]

    def create(self, name: str, base: str, **fields: Any) -> StoredModel:
        self.created.append({"name": name, "base": base, **fields})
        self.stored.append(StoredModel(name))
        return self.stored[-1]
