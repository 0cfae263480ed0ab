"""How often a process has traced each of its functions: written by it, and read by who started it. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


class TraceLog:
    """A file of this process, written again whenever there is a trace more."""

    def __init__(self, folder: Path) -> None:
        self._path = _path_of(folder, os.getpid())
        self._written: dict[str, int] = {}

    def write(self, traces: Mapping[str, int]) -> None:
        if self._written != traces:
            self._written = dict(traces)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._written))
            new.replace(self._path)


def read_traces(folder: Path, pid: int) -> dict[str, int]:
    """Traces of each function; empty if that process traces nothing."""
    path = _path_of(folder, pid)
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _path_of(folder: Path, pid: int) -> Path:
    return folder / f"traces-{pid}.json"
