"""The figure, in the manner of the original: accuracy over epochs, a curve for each way to have workers, with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.experiments.convergence.curves import Curve, band, chosen
from benchmarks.experiments.convergence.plan import Kind
from benchmarks.experiments.convergence.settings import Policy
from benchmarks.experiments.figures import DPI, STYLE, WIDTH

TITLES = {
    Policy.RATE: r"learning rate $\times$ workers",
    Policy.BATCH: "fixed global batch",
}
NAMES = {Kind.TWO: "2 workers", Kind.FOUR: "4 workers", Kind.ELASTIC: "elastic, 2-4 workers"}
# Told apart by line and marker, too; elastic is drawn last and open, so that what it covers shows.
LINES: dict[Kind, dict[str, Any]] = {
    Kind.TWO: {"color": "#8a8a8a", "ls": "-", "lw": 3.2, "marker": "", "alpha": 0.7},
    Kind.FOUR: {"color": "#3b7fb8", "ls": (0, (4, 2)), "lw": 1.4, "marker": "s", "ms": 3},
    Kind.ELASTIC: {"color": "#101010", "ls": "-", "lw": 0.9, "marker": "o", "ms": 4.5, "mfc": "none"},
}


@dataclass(frozen=True, slots=True)
class Accuracies:
    """``title`` says what was trained."""

    curves: Sequence[Curve]
    title: str

    def save(self, path: Path) -> None:
        """In the format of the path's ending."""
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        with matplotlib.rc_context(STYLE):
            self._draw().savefig(path, dpi=DPI, metadata=undated)

    def _draw(self) -> Figure:
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        panels = [policy for policy in TITLES if any(curve.policy is policy for curve in self.curves)]
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, policy in zip(axes, panels, strict=True):
            self._draw_panel(axis, policy)
        axes[0].set_ylabel("accuracy on held-out images")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), title=self.title)
        return figure

    def _draw_panel(self, axis: Any, policy: Policy) -> None:
        for kind, style in LINES.items():
            if curves := chosen(self.curves, policy, kind):
                over = band(curves)
                epochs = range(1, len(over.mean) + 1)
                axis.fill_between(epochs, over.low, over.high, color=style["color"], alpha=0.15, lw=0)
                axis.plot(epochs, over.mean, label=NAMES[kind], **style)
        axis.set_title(TITLES[policy], loc="left", fontsize=9)
        axis.set_xlabel("epoch")
        axis.set_ylim(0, 1.02)
        axis.grid(axis="y", color="#e4e4e4", lw=0.5)
        axis.set_axisbelow(True)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
