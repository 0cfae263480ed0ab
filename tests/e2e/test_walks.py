"""docs/walks.md, whose lists a traced job writes: which files act, from an event to its end, in the order in which they come in."""

import signal
import time
from pathlib import Path

import pytest
from running_job import REPOSITORY, run_cli, start
from test_cli_commands import SIMULATED

from tests.walks import require_written

DOCUMENT = REPOSITORY / "docs" / "walks.md"
TRACED = str(Path(__file__).with_name("traced"))
# What a reader of a walk need not open: values and their names, ways to wait or to say something, and the protocol.
VALUES = """
    common/retry.py common/backoff.py common/credentials.py common/front_ends.py common/reason.py job/jobdir.py job/messages.py
    job/quantities.py job/spec.py master/core/events.py master/core/values.py master/core/worker_record.py
    proto/elasticdl_pb2_grpc.py
"""
# What records, shows, or looks at the job with each tick and finds nothing here.
LISTENERS = """
    cli/folder_job.py cli/follow.py cli/job_handle.py cli/screens.py cli/signals.py job/facts.py job/journal.py
    master/core/rule.py master/core/slowness.py master/core/watching.py master/shell/journal_file.py master/shell/observers.py
"""
# So many files may act. Somebody has to read them.
MOST = {"death": 13, "start": 20, "status": 12}


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The files that act in each walk, in two jobs: what comes in by chance (a tick, a slow start) does so in one of them."""
    first, second = (walked(tmp_path_factory.mktemp("walks")) for _ in range(2))
    return {walk: [path for path in first[walk] if path in second[walk]] for walk in first}


def walked(folder):
    traced = {"ELASTICDL_TRACE": str(folder / "job"), "PYTHONPATH": TRACED}
    with start(folder, "run", "--num_workers", "2", "--", *SIMULATED, **traced) as job:
        first = job.wait_for_world(size=2)
        killed = time.time()
        job.signal(first["members"][1], signal.SIGKILL)
        job.wait_for("a replacement", lambda: 2 in job.entries("world_formed")[-1]["members"])
        replaced = job.entries("world_formed")[-1]
        run_cli(folder, "status", "job", env={**traced, "ELASTICDL_TRACE": str(folder / "status")})
        of_job = calls(folder / f"job.{job.process.pid}")
    of_command = [path for each in folder.glob("status.*") for _, path, _ in calls(each)]
    # Once the job runs its command only follows it.
    death = [path for at, path, _ in of_job if killed <= at <= replaced["time"] and path != "cli/folder_run.py"]
    status = [*of_command, *(path for _, path, call in of_job if call == "Status")]
    return {
        "death": acting(death, LISTENERS),
        "start": acting([path for at, path, _ in of_job if at <= first["time"]], LISTENERS),
        "status": acting(status, "cli/signals.py job/journal.py"),
    }


def calls(trace):
    """Time, file and call of the protocol of each line."""
    lines = (line.split(" ") for line in trace.read_text().splitlines())
    return [(float(at), path, call) for at, path, call in lines]


def acting(paths, listeners):
    left_out = f"{VALUES} {listeners}".split()
    return [path for path in dict.fromkeys(paths) if path not in left_out]


@pytest.mark.parametrize("walk", MOST)
def test_a_walk_has_few_files_and_the_document_names_them(walks, walk):
    require_written(DOCUMENT, walk, walks[walk])
    assert len(walks[walk]) <= MOST[walk]
