"""Experiment 2 as tables, beside what was published. Pure."""

from __future__ import annotations

from benchmarks.experiments.serving.outcome import PUBLISHED, TARGETS, BatchShape

NOTHING = "-"


def table(ours: BatchShape, gpus: int) -> list[tuple[str, str, str]]:
    """Rows of: what, ours, published."""
    requests, steps = ours["requests"], ours["steps"]
    latency = requests["latency"]
    return [
        ("GPUs in use, mean", f"{ours['mean_gpus']:.2f} of {gpus}", f"{PUBLISHED['mean_gpus']} of {PUBLISHED['gpus']}"),
        ("... as a share", f"{ours['utilisation']:.1%}", f"{PUBLISHED['utilisation']:.1%}"),
        ("... of workers in a world and replicas that take requests", f"{ours['working']:.1%}", ""),
        ("GPU for a replica: created to running, s", _lag(ours["reclaim_for_serving"]), ""),
        ("... of this, a worker from its notice to its end, s", _lag(ours["workers_left_within"]), ""),
        (
            "GPU for training: freed to first step, s",
            _lag(ours["reclaim_for_training"]),
            PUBLISHED["reclaim_for_training"],
        ),
        *((f"... {name.replace('_', ' ')}, median, s", _seconds(value), "")
          for name, value in ours["reclaim_for_training"]["parts"].items()),
        ("requests", f"{requests['count']}", ""),
        ("... failed", f"{requests['failed']}", ""),
        ("... refused by a replica and sent to another", f"{requests['refused']}", ""),
        ("latency p50 / p99 / most, s", " / ".join(_seconds(latency[part]) for part in ("p50", "p99", "max")), ""),
        ("training steps made", f"{steps['made']}", ""),
        ("... lost / made twice", f"{steps['lost']} / {steps['twice']}", ""),
    ]  # fmt: skip


def verdicts(ours: BatchShape) -> list[tuple[str, str, str, str]]:
    """Rows of: what, ours, target, whether it is met; the worst of all cases counts."""

    def row(title: str, shown: str, limit: str, met: bool) -> tuple[str, str, str, str]:
        return title, shown, limit, "yes" if met else "no"

    utilisation, reclaim = TARGETS["utilisation"], TARGETS["reclaim"]
    serving, training = (_longest(ours[name]) for name in ("reclaim_for_serving", "reclaim_for_training"))
    failed, lost = ours["requests"]["failed"], ours["steps"]["lost"] + ours["steps"]["twice"]
    share = f"{ours['utilisation']:.1%}"
    return [
        row("GPUs in use, mean", share, f">= {utilisation:.0%}", ours["utilisation"] >= utilisation),
        row("GPU for a replica, longest, s", _seconds(serving), f"<= {reclaim:g}", _within(serving, reclaim)),
        row("GPU for training, longest, s", _seconds(training), f"<= {reclaim:g}", _within(training, reclaim)),
        row("failed requests", str(failed), "0", failed == 0),
        row("steps lost or made twice", str(lost), "0", lost == 0),
    ]


def _longest(found: BatchShape) -> float | None:
    """Of those that came to an end, and those that did not."""
    return max([*found["unfinished"], *([found["max"]] if found["n"] else [])], default=None)


def _within(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def _lag(found: BatchShape) -> str:
    if not found["n"]:
        return NOTHING
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f}, n={found['n']})"


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
