"""What a worker of `benchmarks.start` says of its start, once; and how it spends the time until it is killed."""

import json
import os
import time
from pathlib import Path

FOLDER = "BENCHMARK_FOLDER"


def write_start(began: float) -> None:
    """``began``: the time of the program's first line."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
    if not path.exists():
        text = json.dumps({"began": began, "stepped": time.time(), "cpu": time.process_time()})
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)


def rest() -> None:
    time.sleep(0.2)
