"""The dashboard asks for metrics that there are."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.metrics import Metrics
from mlxserve.core.stats import EngineStats

DASHBOARD = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def served() -> set[str]:
    """Every sample's name."""
    metrics = Metrics()
    metrics.watch(lambda: {"m": EngineStats(*[0] * len(dataclasses.fields(EngineStats)))})
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", metrics.render().decode(), flags=re.MULTILINE)
    return {name + suffix for name, kind in kinds if not name.endswith("_created") for suffix in SUFFIXES[kind]}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_ask_for_what_is_served(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        names = re.findall(r"mlxserve_\w+", target["expr"])
        assert names
        assert set(names) <= served()
        assert target["expr"].count("(") == target["expr"].count(")")


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in PANELS
        for grid in [panel["gridPos"]]
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_every_family_has_a_panel() -> None:
    """What is left out here is left out on purpose."""
    shown = {name for panel in PANELS for t in panel["targets"] for name in re.findall(r"mlxserve_\w+", t["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served()}
    missing = {family for family in families if not any(name.startswith(family) for name in shown)}
    assert missing == {
        "mlxserve_request_prompt_tokens",
        "mlxserve_request_generation_tokens",
        "mlxserve_steps_total",
        "mlxserve_kv_disk_enabled",
        "mlxserve_kv_disk_bytes",
        "mlxserve_kv_disk_writes_total",
        "mlxserve_kv_disk_errors_total",
    }
