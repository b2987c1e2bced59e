"""A client of the stand-in hub, in a process of its own with HF_ENDPOINT set."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from standin_hub import Hub, Repo
from tiny_repos import CONFIG, WANTED, model_files, weights

FILES = model_files()
ADAPTER = {
    "adapter_config.json": b'{"num_layers": 1, "lora_parameters": {"rank": 8, "scale": 1.0, "dropout": 0.0}}',
    "adapters.safetensors": weights(0, 10),
}
TOTAL = sum(len(FILES[name]) for name in WANTED)


def own_code(**changes: Any) -> Repo:
    return Repo({**FILES, "config.json": json.dumps({**CONFIG, **changes}).encode()})


def environment(endpoint: str, home: Path, **environ: str) -> dict[str, str]:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*"}
    env["PYTHONPATH"] = str(Path(__file__).parent.parent)
    env["MLXSERVE_CONFIG_DIR"] = str(home / "config")
    for key in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        env.pop(key, None)
    return {**env, **environ}


def start(endpoint: str, home: Path, *calls: dict[str, Any], order: str = "in-turn", **environ: str):
    client = Path(__file__).with_name("hub_client.py")
    return subprocess.Popen(
        [sys.executable, str(client), json.dumps(calls), order],
        env=environment(endpoint, home, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cli(endpoint: str, home: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mlxserve", *command],
        env=environment(endpoint, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What each call came to; the last one gets what was written on stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    outcomes: list[dict[str, Any]] = json.loads(out)
    outcomes[-1]["stderr"] = err
    return outcomes


def run(endpoint: str, home: Path, *calls: dict[str, Any], **environ: str) -> list[dict[str, Any]]:
    return finish(start(endpoint, home, *calls, **environ))


def pull(server: Hub, home: Path, name: str = "test/model", **arguments: Any) -> dict[str, Any]:
    (outcome,) = run(server.url, home, {"method": "pull", "name": name, **arguments})
    return outcome


PULL = {"method": "pull", "name": "test/model"}
SHOW = {"method": "show", "name": "test/model"}
REMOVE = {"method": "remove", "name": "test/model"}
LIST = {"method": "models"}
