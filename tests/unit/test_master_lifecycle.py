"""The tables themselves: that they leave nobody behind, and that the documents show what they say."""

from pathlib import Path

import pytest

from elasticdl.master.core.transitions import ROWS, WORKERS, Trigger
from elasticdl.master.core.values import WorkerState
from scripts.draw_states import draw_worker_core, draw_workers

DOCS = Path(__file__).resolve().parents[2] / "docs"
GONE = (WorkerState.COMPLETED, WorkerState.GONE)


@pytest.mark.parametrize(
    ("page", "picture"),
    [("architecture.md", draw_workers()), ("worker_side.md", draw_worker_core())],
)
def test_the_documents_show_the_tables(page, picture):
    assert f"```mermaid\n{picture}\n```" in (DOCS / page).read_text(), "run scripts/draw_states.py, and put it there"


def test_no_row_contradicts_another():
    assert len(WORKERS) == sum(len(states) for states, *_ in ROWS)


@pytest.mark.parametrize("state", [state for state in WorkerState if state not in GONE])
def test_every_process_ends(state):
    assert WORKERS[state, Trigger.EXIT][0] in GONE


def test_whoever_has_finished_stays_so_unless_training_goes_on_without_it():
    done = (WorkerState.FINISHED, WorkerState.COMPLETED)
    for (state, trigger), (following, _) in WORKERS.items():
        if state in done and trigger is not Trigger.REOPEN:
            assert following in done
