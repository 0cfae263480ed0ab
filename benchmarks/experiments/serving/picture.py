"""The figure of experiment 2 in the manner of the original: GPUs of training, of serving, and of both; below, the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments.figures import DPI, STYLE, WIDTH
from benchmarks.experiments.measures import Change, spans
from benchmarks.experiments.serving.records import Request

BINS = 92  # of the load's time
INK = "#1a1a1a"
LOOKS = (("#1f4e79", "-"), ("#4f94cd", "--"))


@dataclass(frozen=True, slots=True)
class Picture:
    changes: Sequence[Change]
    requests: Sequence[Request]
    end: float
    gpus: int
    serving: str
    training: str

    def save(self, path: Path) -> None:
        """In the format of the path's ending."""
        undated = {} if path.suffix == ".png" else {"Date": None} if path.suffix == ".svg" else {"CreationDate": None}
        with matplotlib.rc_context(STYLE):
            self._draw().savefig(path, dpi=DPI, metadata=undated)

    def _draw(self) -> Figure:
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        gpus, load, latency = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
        self._draw_gpus(gpus)
        width = self.end / BINS
        bins = {
            number: list(group)
            for number, group in groupby(sorted(self.requests, key=_time), lambda request: int(request.time / width))
        }
        edges = [number * width for number in range(BINS + 1)]
        rates = [len(bins.get(number, ())) / width for number in range(BINS)]
        load.stairs(rates, edges, fill=True, facecolor="#d9d9d9", edgecolor=INK, lw=0.6)
        load.set_ylabel("requests/s")
        for part, style in ((50, "-"), (99, ":")):
            times = [edges[number] + width / 2 for number in bins]
            found = [float(np.percentile([each.latency for each in group], part)) for group in bins.values()]
            latency.plot(times, found, style, color=INK, lw=1.0, label=f"p{part}")
        latency.set_ylabel("latency, s")
        latency.set_ylim(bottom=0)
        latency.legend(loc="upper right", ncols=2)
        latency.set_xlabel("time in seconds")
        latency.set_xlim(0, self.end)
        figure.align_ylabels()
        return figure

    def _draw_gpus(self, axis: Any) -> None:
        steps = list(spans(self.changes, self.end))
        edges = [span.start for span, _ in steps] + [self.end]
        total = [sum(held.values()) for _, held in steps]
        lines = {"training": self.training, "serving": self.serving}
        for (label, owner), (colour, style) in zip(lines.items(), LOOKS, strict=True):
            values = [held.get(owner, 0) for _, held in steps]
            axis.stairs(values, edges, baseline=None, color=colour, lw=1.6, ls=style, label=label)
        axis.stairs(total, edges, baseline=None, color=INK, lw=0.9, label="both")
        axis.set_ylim(0, self.gpus * 1.25)
        axis.set_yticks(range(0, self.gpus + 1, 2 if self.gpus > 4 else 1))
        axis.set_ylabel("GPUs in use")
        axis.legend(loc="upper center", ncols=3)


def _time(request: Request) -> float:
    return request.time
