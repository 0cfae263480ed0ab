"""Plots in the manner of the original report, for print: vector, readable in grey, no more ink than needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.experiments.measures import Change, spans

STYLE: Any = {  # matplotlib names every key in its types
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "elasticdl",  # the same figure is the same file
    "pdf.fonttype": 42,
}
WIDTH = 6.3  # inches, of a printed page's text
DPI = 200
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
    """GPUs over time of one run; ``marks`` are moments worth a line, by what to write there."""

    title: str
    changes: Sequence[Change]
    end: float
    marks: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels one above the other, over the same time; ``owners`` by their name in the series: what the legend says."""

    panels: Sequence[Panel]
    owners: Mapping[str, str]
    gpus: int

    def save(self, path: Path) -> None:
        """In the format of the path's ending."""
        with matplotlib.rc_context(STYLE):
            self._draw().savefig(path, dpi=DPI, metadata=_undated(path))

    def _draw(self) -> Figure:
        figure = Figure(figsize=(WIDTH, 1.75 * len(self.panels) + 0.5), layout="constrained")
        axes = figure.subplots(len(self.panels), 1, sharex=True, squeeze=False)[:, 0]
        last = max(panel.end for panel in self.panels)
        for axis, panel in zip(axes, self.panels, strict=True):
            self._draw_panel(axis, panel, last)
            axis.set_xlim(0, last * 1.02)
        axes[-1].set_xlabel("time in seconds")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=min(4, len(names)))
        return figure

    def _draw_panel(self, axis: Any, panel: Panel, last: float) -> None:
        steps = list(spans(panel.changes, panel.end))
        edges = [span.start for span, _ in steps] + [panel.end]
        base = [0.0] * len(steps)
        for (owner, label), (colour, hatch) in zip(self.owners.items(), FILLS, strict=False):
            top = [below + held.get(owner, 0) for below, (_, held) in zip(base, steps, strict=True)]
            axis.stairs(top, edges, baseline=base, fill=True, facecolor=colour, hatch=hatch, edgecolor="white", lw=0)
            axis.stairs(top, edges, baseline=None, color="#1a1a1a", lw=0.7)
            axis.bar([0], [0], color=colour, hatch=hatch, edgecolor="white", label=label)
            base = top
        axis.axhline(self.gpus, color="#666666", lw=0.6, ls=(0, (4, 3)))
        axis.text(last * 1.015, self.gpus * 0.985, "all GPUs", fontsize=6, color="#666666", ha="right", va="top")
        axis.set_ylim(0, self.gpus * 1.22)
        axis.set_yticks(range(0, self.gpus + 1, 2))
        axis.set_ylabel("GPUs in use")
        axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
        for text, when in panel.marks.items():
            side = "left" if when < 0.15 * last else "right" if when > 0.85 * last else "center"
            axis.vlines(when, 0, self.gpus * 1.05, color="#1a1a1a", lw=0.6)
            axis.text(when, self.gpus * 1.07, text, fontsize=7, ha=side, va="bottom")


def _undated(path: Path) -> dict[str, None]:
    """Without the moment at which it was drawn."""
    return {} if path.suffix == ".png" else {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}
