"""Arbitrary events: whatever workers and launchers say, in whatever order. And the tables that decide what follows."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from play_kit import step

from elasticdl.job import messages as m
from elasticdl.job.journal import KINDS
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.transitions import ROWS, WORKERS
from elasticdl.master.core.values import Settings, World
from elasticdl.master.shell.calls import to_event
from elasticdl.proto import elasticdl_pb2 as pb
from scripts.draw_states import draw_worker_core, draw_workers

OF_WORKERS = [name for name, kind in KINDS.items() if kind.of_worker]
IDS, SMALL = st.integers(-1, 6), st.integers(0, 4)
VALUES = st.one_of(SMALL, st.just("x"), st.just(["x"]), st.just({"1": 1.0}))
NOTICES = st.sampled_from(OF_WORKERS).flatmap(
    lambda name: st.tuples(st.just(name), st.dictionaries(st.sampled_from(sorted(KINDS[name].of_worker)), VALUES))
)


def given_by_a_worker(worker_id, notice):
    """As a master takes it: only a notice that means something."""
    event, fields = notice
    try:
        return to_event(worker_id, pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields))))
    except ValueError:
        return e.Tick()


def said(kind, *values):
    return st.builds(e.FromWorker, IDS, st.builds(kind, *values))


STEP = st.builds(m.StepReport, SMALL, SMALL, *[SMALL] * 3, st.just(0.1), SMALL, SMALL, st.booleans())
FOUND = st.builds(e.FoundWorker, IDS, st.sampled_from(["", "h"]))
RANGES = st.builds(lambda a, b: WorkerRange(minimum=a, maximum=a + b), st.integers(1, 3), SMALL)
ANYTHING = st.one_of(
    st.just(e.Tick()),
    said(m.Hello, st.just("h"), SMALL, SMALL),
    st.builds(e.WorkersFound, st.lists(FOUND, max_size=3).map(tuple)),
    st.builds(e.WorkerDisconnected, IDS),
    said(m.Heartbeat, SMALL, SMALL, SMALL, st.booleans()),
    st.builds(given_by_a_worker, IDS, NOTICES),
    said(m.Progress, st.lists(STEP, max_size=3).map(tuple), SMALL, SMALL),
    st.builds(e.StacksFound, IDS, st.sampled_from(["", "File"]), st.just(""), st.booleans()),
    said(m.Ask, SMALL, SMALL, st.booleans(), st.booleans()),
    said(m.Draining, st.just("")),
    said(m.Finished, SMALL, SMALL, st.just({})),
    said(m.Failed, st.booleans(), st.just("why")),
    st.builds(e.WorkerPending, IDS, st.just("full")),
    st.builds(e.WorkerPlaced, IDS, st.just("h"), SMALL),
    st.builds(e.WorkerExited, IDS, st.sampled_from(list(e.ExitCause)[:-3]), SMALL),
    st.builds(e.LauncherFailed, st.just("why")),
    st.builds(e.ScaleRequested, RANGES),
    st.builds(e.StopRequested, st.just("why"), st.booleans(), st.booleans()),
)


@given(st.lists(st.tuples(ANYTHING, st.floats(0, 3)), max_size=60), st.booleans(), st.integers(0, 60))
def test_no_sequence_of_events_is_too_absurd(events, own_program, restarted):
    """Nothing raises, versions grow, the job ends at most once, and nothing happens after its end."""
    limits = Settings(WorkerRange(minimum=1, maximum=3), own_program=own_program)
    job, now, version, ended = Job(limits), 0.0, 0, False
    for number, (event, pause) in enumerate(events):
        now += pause
        if number == restarted and not ended:
            job = Job(limits, job.snapshot())
        for instruction in step(job, event, now):
            assert not ended
            if isinstance(instruction, e.Tell) and isinstance(instruction.message, World):
                assert instruction.message.version >= version
                version = instruction.message.version
            ended = isinstance(instruction, e.EndJob)
        assert isinstance(job.reason, str)
        assert len(job.workers) <= len(job.records)


@pytest.mark.parametrize(
    ("page", "picture"), [("architecture.md", draw_workers()), ("worker_side.md", draw_worker_core())]
)
def test_the_documents_show_the_tables_whose_rows_do_not_contradict_each_other(page, picture):
    shown = (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    assert f"```mermaid\n{picture}\n```" in shown, "run scripts/draw_states.py, and put it there"
    assert len(WORKERS) == sum(len(states) for states, *_ in ROWS)
