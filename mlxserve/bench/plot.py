"""Draws charts with matplotlib, which the extra `bench` installs."""

import importlib.util
from pathlib import Path
from typing import Any

from mlxserve.bench.charts import Chart, Panel

MISSING = "There are no plots: matplotlib is not installed; `pip install 'mlxserve[bench]'` and measure again."
PANEL_INCHES = (4.6, 3.4)
DOTS_PER_INCH = 110


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, folder: Path) -> str:
    """Write NAME.svg and NAME.png, and return the name of the first."""
    import matplotlib
    from matplotlib.figure import Figure

    # A text stays a text, and the same data gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.size": 9}):
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * len(chart.panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(chart.panels), squeeze=False)[0], chart.panels, strict=True):
            _draw(axes, panel)
        figure.suptitle(chart.title)
        figure.savefig(folder / f"{chart.name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{chart.name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return f"{chart.name}.svg"


def _draw(axes: Any, panel: Panel) -> None:
    for curve in panel.curves:
        if panel.is_distribution:
            axes.plot(curve.xs, curve.ys, label=curve.label)
            continue
        (drawn,) = axes.plot(curve.xs, curve.ys, marker="o", markersize=4, label=curve.label)
        axes.fill_between(curve.xs, curve.lows, curve.highs, alpha=0.2, color=drawn.get_color())
    axes.set_xlabel(panel.x_title)
    axes.set_ylabel(panel.y_title)
    axes.set_ylim(bottom=0)
    if not panel.is_distribution:
        axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if panel.curves:
        axes.legend(fontsize=7)
