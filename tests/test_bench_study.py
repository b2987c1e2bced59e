"""`mlxserve bench study` with stand-ins in place of the servers it starts: every part asks what it should."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import standin_server
from helpers_bench import in_virtual_time
from standin_server import Plan, StandinServer
from tokenizers import Tokenizer

from mlxserve.bench import cold_start, model_files, plot, study
from mlxserve.bench.client import Target
from mlxserve.bench.model_files import ModelFiles
from mlxserve.bench.process import ServerSpec
from mlxserve.bench.study import Options
from mlxserve.errors import BenchError, TargetError

CAPACITY = 256
COUNTERS = """# TYPE mlxserve_num_preemptions_total counter
mlxserve_num_preemptions_total{model="tiny"} 5.0
mlxserve_num_preemptions_total{model="other"} 2.0
"""


class Fleet:
    """Servers by their commands; each is a stand-in in this event loop."""

    def __init__(self, health: int = 200) -> None:
        self.commands: list[list[str]] = []
        self.standins: list[StandinServer] = []
        self.health = health

    def start(self, spec: ServerSpec, log: Path) -> "Process":
        return Process(self, spec)

    def standin(self) -> StandinServer:
        card = {"id": "tiny", "context_length": CAPACITY, "loaded": True}
        pages = standin_server.models(card) | {
            "/v1/models/tiny": standin_server.page(card),
            "/metrics": Plan([(0.0, COUNTERS.encode())]),
            "/health": standin_server.page({"status": "ok"}, status=self.health),
        }

        def choose(body: dict[str, Any]) -> Plan:
            if not body.get("stream"):
                return standin_server.page({"choices": [{"message": {"content": "Hello"}}]})
            return Plan.of_tokens([0.2] + [0.05] * (body["max_tokens"] - 1), prompt_tokens=7)

        self.standins.append(StandinServer(choose, pages))
        return self.standins[-1]


class Process:
    """What the study knows of a server process."""

    def __init__(self, fleet: Fleet, spec: ServerSpec) -> None:
        self.spec = spec
        self.command = list(spec.command)
        self.target = Target(0, "tiny", {"ignore_eos": True})
        self._fleet = fleet
        self._running: Any = None

    def start(self) -> None:
        self._fleet.commands.append(self.command)

    async def wait_until_healthy(self) -> None:
        standin = self._fleet.standin()
        self._running = standin.running()
        await self._running.__aenter__()
        self.target = Target(standin.port, "tiny", {"ignore_eos": True})

    def stop(self) -> None:
        pass  # with the event loop


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path) -> Fleet:
    fleet = Fleet()
    for module in (study, cold_start):
        monkeypatch.setattr(module, "Server", fleet.start)
    files = ModelFiles("tiny", Tokenizer.from_file(str(tokenizer_file)), "4-bit")
    monkeypatch.setattr(model_files, "read", lambda name: files)
    return fleet


def run(folder: Path) -> str:
    options = Options("tiny", runs=1, threads=3, seed=0, is_quick=True)
    try:
        in_virtual_time(study.run(options, folder, lambda text: None))
    finally:
        text = (folder / "report.md").read_text() if folder.exists() else ""
    return text


def test_every_part_has_its_figures_and_its_servers(fleet: Fleet, tmp_path: Path) -> None:
    text = run(tmp_path / "study")
    assert "INCOMPLETE" not in text
    titles = re.findall(r"^## (\d)\. (.+)$", text, re.M)
    assert [number for number, _ in titles] == list("12345678")
    assert "Quantisation: 4-bit" in text
    flags = [" ".join(command[command.index("--threads") + 2 :]) for command in fleet.commands]
    unlimited = "--target-itl-ms 1000000"
    assert flags == [
        *["", "", ""],
        *(f"--max-prefill-tokens {budget} {unlimited}" for budget in study.QUICK.budgets),
        *(f"--block-size {size}" for size in study.QUICK.block_sizes),
        f"--kv-cache-bytes {study.SMALL_CACHE_BYTES}",
        "",
        "--no-prefix-caching",
    ]
    assert "| small cache | 0 |" in text
    assert "| roomy cache | 7 |" in text
    assert re.search(r"^\| 2272 \| 32 \| 1 \| 1 \| 1 \| 0\.20 ", text, re.M)
    assert re.search(r"^\| 250 \| EOS, up to 128 \|", text, re.M)
    assert re.search(r"^\| `POST /v1/chat/completions` \| 200 \|", text, re.M)
    # Eight prompts of a quarter of the small cache each, twice: on all three servers the same.
    revisited = [[body["prompt"] for body in each.bodies if body["max_tokens"] == 4][-16:] for each in fleet.standins]
    assert len(revisited[-1]) == 16
    assert revisited[-1] == [body["prompt"] for body in fleet.standins[-3].bodies if body["max_tokens"] == 4][1:17]
    pictures = re.findall(r"^!\[.*\]\((.+)\)$", text, re.M)
    assert len(pictures) == len(set(pictures))
    assert {"budget.svg", "block-size.svg", "input-length.svg", "concurrency.svg"} <= set(pictures)
    assert all((tmp_path / "study" / picture).exists() for picture in pictures)
    assert (tmp_path / "study" / "cache" / "requests.csv").exists()


def test_a_failed_service_check_ends_it(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "is_available", lambda: False)
    fleet.health = 503
    with pytest.raises(BenchError, match="service check failed: `GET /health` did not answer 200"):
        run(tmp_path / "study")
    text = (tmp_path / "study" / "report.md").read_text()
    assert text.startswith("# Study\n\n**INCOMPLETE: the service check failed")
    assert "## 3. Output length" in text
    assert "## 5." not in text
    assert "pip install 'mlxserve[bench]'" in text


def test_a_server_that_does_not_start(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Process) -> None:
        await asyncio.sleep(0)
        raise TargetError("mlxserve does not run: no weights here")

    monkeypatch.setattr(Process, "wait_until_healthy", fail)
    with pytest.raises(BenchError, match="no weights here"):
        run(tmp_path / "study")
    assert "INCOMPLETE: mlxserve does not run" in (tmp_path / "study" / "report.md").read_text()


def test_the_files_of_a_model(demo_model: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    found = model_files.find("smollm2-135m")
    assert found is not None
    assert found.quantization == "Q4_1 in its GGUF file"
    assert found.tokenizer.encode("Hello there").ids
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "config.json").write_text('{"quantization": {"bits": 4, "group_size": 64}}')
    assert model_files.read(str(tmp_path / "tokenizer.json")).quantization == "4-bit, groups of 64"
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert model_files.read(str(tmp_path)).quantization == "bfloat16"
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), "no-such-alias", "nobody/has-this"):
        with pytest.raises(BenchError):
            model_files.read(name)
        assert model_files.find(name) is None
