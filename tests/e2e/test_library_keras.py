"""A loop of one's own on Keras, as real processes with real Horovod."""

import json
import signal
from pathlib import Path

import pytest
from running_job import QUICK_KERAS, start

pytest.importorskip("tensorflow")
SCRIPT = Path(__file__).parent / "scripts" / "library_keras.py"


def test_growth_from_one_worker_and_a_kill_trace_nothing_again(tmp_path):
    end = tmp_path / "end"
    arguments = ["--num_workers", "1", "--slots", "2", "--", "python", str(SCRIPT), str(end), str(tmp_path)]
    with start(tmp_path, "run", *arguments, **QUICK_KERAS) as job:
        alone = job.wait_for_world(size=1)
        job.scale(2)
        both = job.wait_for_world(size=2, after=alone["world"])
        job.wait_for("steps of two", lambda: [p for p in job.entries("pause") if p["world"] >= both["world"]])
        job.scale(1, 2)
        job.signal(both["members"][1], signal.SIGKILL)
        left = job.wait_for_world(size=1, after=both["world"])
        again = job.wait_for_world(size=2, after=left["world"])
        job.wait_for("steps of two", lambda: [p for p in job.entries("pause") if p["world"] >= again["world"]])
        end.touch()
        assert job.finish() == 0, job.describe()
        pauses = job.entries("pause")
        reports = [json.loads(path.read_text()) for path in tmp_path.glob("[0-9]*.json")]
    assert [pause["kind"] for pause in pauses] == ["grow", "failure", "grow"]
    one, other = reports
    assert one == other
    assert one["step"] == len(one["losses"])
    assert one["traces"] == dict.fromkeys(("differentiate", "micro", "add", "update", "apply"), 1)
