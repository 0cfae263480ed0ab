"""The experiments' figures in the manner of the original report, for print: vector, readable in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.experiments.measures import Change, spans

STYLE: Any = {  # matplotlib names every key in its types
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "elasticdl",  # the same figure is the same file
    "pdf.fonttype": 42,
}
UNDATED: Any = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # without the moment at which it was drawn
WIDTH = 6.3  # inches, of a printed page's text
INK = "#1a1a1a"
# By lightness first, so that they can be told apart in grey.
FILLS = (
    ("#1f4e79", ""),
    ("#9cc3e6", "////"),
    ("#d9d9d9", "...."),
    ("#e69f00", ""),
    ("#f6dfa8", "xxxx"),
    ("#00725a", ""),
    ("#8fd3be", "\\\\\\\\"),
    ("#7a3b69", ""),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """GPUs over time of one run; ``marks`` are moments worth a line, by what to write there. Owners' names begin with ``prefix``."""

    title: str
    changes: Sequence[Change]
    end: float
    marks: Mapping[str, float]
    prefix: str = ""


def draw_gpus(path: Path, panels: Sequence[Panel], owners: Mapping[str, str], gpus: int) -> None:
    """Panels one above the other, over the same time; ``owners`` by their name in the series: what the legend says."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.75 * len(panels) + 0.5), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        last = max(panel.end for panel in panels)
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, owners, gpus, last)
        axes[0].set_xlim(0, last * 1.02)
        axes[-1].set_xlabel("time in seconds")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=min(4, len(names)))
        figure.savefig(path, dpi=200, metadata=UNDATED.get(path.suffix))


def _draw_panel(axis: Any, panel: Panel, owners: Mapping[str, str], gpus: int, last: float) -> None:
    steps = list(spans(panel.changes, panel.end))
    edges = [span.start for span, _ in steps] + [panel.end]
    base = [0.0] * len(steps)
    for (owner, label), (colour, hatch) in zip(owners.items(), FILLS, strict=False):
        top = [below + held.get(panel.prefix + owner, 0) for below, (_, held) in zip(base, steps, strict=True)]
        axis.stairs(top, edges, baseline=base, fill=True, fc=colour, hatch=hatch, ec="white", lw=0, label=label)
        axis.stairs(top, edges, baseline=None, color=INK, lw=0.7)
        base = top
    axis.axhline(gpus, color=INK, lw=0.6, ls="--")
    axis.set_ylim(0, gpus * 1.22)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("GPUs in use")
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    for text, when in panel.marks.items():
        side = "left" if when < 0.15 * last else "right" if when > 0.85 * last else "center"
        axis.vlines(when, 0, gpus * 1.05, color=INK, lw=0.6)
        axis.text(when, gpus * 1.07, text, fontsize=7, ha=side, va="bottom")


@dataclass(frozen=True, slots=True)
class Band:
    """Over the seeds, epoch by epoch."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


# Told apart by line and marker, too; what is drawn last is open, so that what it covers shows.
BANDS: Sequence[dict[str, Any]] = (
    {"color": "#8a8a8a", "ls": "-", "lw": 3.2, "alpha": 0.7},
    {"color": "#3b7fb8", "ls": "--", "lw": 1.4, "marker": "s", "ms": 3},
    {"color": INK, "ls": "-", "lw": 0.9, "marker": "o", "ms": 4.5, "mfc": "none"},
)


def draw_accuracies(path: Path, title: str, panels: Mapping[str, Mapping[str, Band]]) -> None:
    """Accuracy over epochs: panels by their titles, and in each a band by its name."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (name, bands) in zip(axes, panels.items(), strict=True):
            for (label, band), style in zip(bands.items(), BANDS, strict=False):
                epochs = range(1, len(band.mean) + 1)
                axis.fill_between(epochs, band.low, band.high, color=style["color"], alpha=0.15, lw=0)
                axis.plot(epochs, band.mean, label=label, **style)
            axis.set_title(name, loc="left", fontsize=9)
            axis.set_xlabel("epoch")
            axis.set_ylim(0, 1.02)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].set_ylabel("accuracy on held-out images")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), title=title)
        figure.savefig(path, dpi=200, metadata=UNDATED.get(path.suffix))
