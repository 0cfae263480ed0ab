"""What holds of a worker's core after every step."""

from __future__ import annotations

from elasticdl.elastic.core.lifecycle import IN_WORLD, TRAINING, WorkerState
from elasticdl.elastic.core.worker import WorkerCore

S = WorkerState


def validate(core: WorkerCore) -> None:
    """Raises:
    AssertionError: an invariant does not hold; the message names it.
    """
    position, state = core.position, core.state
    invariants = {
        "a request to join is open exactly while the worker waits": (core.request is not None) == (state is S.WAITING),
        "a batch is in hand only before the first world and in training": position.batch is None
        or state in (S.PREPARING, *TRAINING),
        "a step is unsaved only where training stands": not position.unsaved
        or state in (S.PREPARING, *TRAINING, S.COMPLETE, S.GONE),
        "what is saved is never ahead of where training stands": position.saved.step <= position.progress.step,
        "an unsaved step is saved in its place": not position.unsaved or position.saved.step == position.progress.step,
        "who trains holds the state": state not in TRAINING or position.has_state or not core.under_master,
        "a worker that is to leave does not wait": state is not S.WAITING or not (core.stopping or core.lost),
        "a last word is the end": core.last_word is None or state is S.GONE,
        "no world is entered that was left": state not in IN_WORLD
        or not core.under_master
        or core.world.version > core.left_version
        or state is S.COMPLETE,
    }
    violated = [sentence for sentence, holds in invariants.items() if not holds]
    assert not violated, f"worker {core.worker_id}, {state}: {'; '.join(violated)}"
