"""What all benchmarks share: summaries of samples, facts about the machine, results as JSON lines, tables for people."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
LOAD_SECONDS = 1.0
FILE_WIDTH = 140
LIBRARIES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "grpcio", "elasticdl")


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some samples; percentiles interpolate linearly, so that with few samples they lie close below the maximum."""

    n: int
    median: float
    p90: float
    p95: float
    p99: float
    minimum: float
    maximum: float

    def show(self, digits: int = 3) -> str:
        median, low, high = (f"{each:.{digits}f}" for each in (self.median, self.minimum, self.maximum))
        return f"{median} ({low}-{high})"


def summarise(values: Iterable[float]) -> Summary:
    """Raises:
    ValueError: there are no values.
    """
    samples = np.asarray(list(values), dtype=float)
    if not len(samples):
        raise ValueError("nothing was measured")
    median, p90, p95, p99, least, most = map(float, np.percentile(samples, (50, 90, 95, 99, 0, 100)))
    return Summary(len(samples), median, p90, p95, p99, least, most)


def summarise_fields(samples: Sequence[Any]) -> dict[str, Summary]:
    """Of dataclasses of numbers, field by field."""
    return {field.name: summarise(getattr(each, field.name) for each in samples) for field in fields(samples[0])}


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the numbers, the load of others just before included."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "busy_cores_before": busy_cores(LOAD_SECONDS),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions(LIBRARIES),
    }


def busy_cores(seconds: float) -> float:
    """How many cores everybody on this machine kept busy while this function waited."""
    return round(psutil.cpu_percent(interval=seconds) / 100 * (psutil.cpu_count() or 1), 2)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions(libraries: Iterable[str], path: Sequence[str] | None = None) -> dict[str, str]:
    """Of those that are installed: here, or in other folders than this Python's."""
    found: dict[str, str] = {}
    for name in libraries:
        for distribution in importlib.metadata.distributions(name=name, path=list(path or sys.path)):
            found.setdefault(name, distribution.version)
    return found


class Results:
    """Appends one JSON object a line, each with the benchmark, the time and the machine, which it tells at once."""

    def __init__(self, benchmark: str, out: Path | None) -> None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        self.path = out or RESULTS / f"{benchmark}-{stamp}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.machine = machine_facts()
        self._benchmark = benchmark
        print(describe_machine(self.machine), flush=True)

    def add(self, kind: str, **fields: Any) -> None:
        entry = {"benchmark": self._benchmark, "kind": kind, "time": time.time(), **fields, "machine": self.machine}
        with self.path.open("a") as lines:
            lines.write(json.dumps(entry, default=_plain) + "\n")


def _plain(value: Any) -> object:
    if isinstance(value, Summary):
        return {name: round(number, 6) for name, number in asdict(value).items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)


def show_summaries(title: str, rows: Mapping[str, Mapping[str, Summary]], digits: int = 2) -> None:
    """Median and range of whatever was measured, in columns by its names."""
    columns = [column.replace("_", " ") for row in list(rows.values())[:1] for column in row]
    cells = [
        [name, str(max(each.n for each in row.values())), *(each.show(digits) for each in row.values())]
        for name, row in rows.items()
    ]
    show_table(f"{title}: median (range)", ["", "n", *columns], cells)


def flat(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers within numbers: each by all of its names."""
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            found |= {f"{name} {inner}": each for inner, each in flat(value).items()}
        elif not isinstance(value, list | tuple):
            found[name] = value
    return found


def show_numbers(title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """What one or several runs came to, beside each other."""
    flattened = [flat(numbers) for numbers in columns.values()]
    names = dict.fromkeys(name for numbers in flattened for name in numbers)
    rows = [[name.replace("_", " "), *(_shown(numbers.get(name)) for numbers in flattened)] for name in names]
    show_table(title, ["", *columns], rows)


def judge(ours: Mapping[str, Any], targets: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Rows of: what, ours, target, whether it is met. A target is a limit, as in ``<= 0.8``; what there is not misses it."""
    rows = []
    for name, target in targets.items():
        value, (sign, limit) = ours.get(name), target.split()
        met = value is not None and (value <= float(limit) if sign == "<=" else value >= float(limit))
        rows.append((name.replace("_", " "), _shown(value), target, "yes" if met else "no"))
    return rows


def show_targets(ours: Mapping[str, Any], targets: Mapping[str, str]) -> None:
    show_table("Targets", ("", "ours", "target", "met"), judge(ours, targets))


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB; "
        f"busy before the start: {machine['busy_cores_before']} cores"
    )


def names(text: str) -> list[str]:
    """A comma-separated argument; an empty one is refused."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("give at least one, separated by commas")
    return parts


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers above 0."""
    values = [int(part) for part in names(text)]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("give numbers above 0, separated by commas")
    return values


class Parser(argparse.ArgumentParser):
    """Of `python -m benchmarks.NAME`; tells what is wrong in one line, without the usage."""

    def __init__(self, name: str, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(f"python -m benchmarks.{name}", description=description, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def require_known(self, args: argparse.Namespace, **known: Iterable[str]) -> None:
        """Of options that take several names, those that are known."""
        for option, these in known.items():
            if unknown := set(getattr(args, option)) - set(these):
                self.error(f"--{option}: {', '.join(sorted(unknown))}: not one of {', '.join(these)}")


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="file for one JSON line per result; default: benchmarks/results/")
