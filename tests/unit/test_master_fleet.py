"""Which workers are launched and let go, who is given up, and what an exit means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from play_kit import PATIENT, Play, launched, tell

from elasticdl.master.core.fleet import LONGEST_DELAY
from elasticdl.master.core.values import CRASHES_IN_TRAINING, LIVE
from tests.stories import told_in

FLEETS = """
a crashed worker is replaced after a delay that doubles (1-3)
  tick; 0 crashed; wait 0.4 -> launch 0 1 2: asked for
  wait 0.2 -> launch 3
  1 crashed; wait 0.9 -> nothing
  wait 0.2 -> launch 4; worker_launched replaces = False, False, False, True, True
scaling down lets go those of least use first (1-4)
  0-3 train
  scale 1-6; 4 pend: no slot -> launch 4 5
  scale 1-2 -> change 1 for 0 1; kill 4 5: the job was scaled to at most 2; drain 3 2
  wait 1 -> nothing
  3 clean; wait 1 -> nothing; worker_left cause = drained
scaling down forgets whom it was to replace (1-3)
  tick; 0 crashed; scale 1 -> launch 0 1 2; ...
  scale 1-3 -> launch 3 4: asked for

a worker that overstays its leave is killed and one that has finished is not (1-3, own_program)
  0 1 2 train
  1 2 drain; 2 finishes; wait 30 -> change 1 for 0 2; launch 3; launch 4
  wait 0.2 -> broken 1 for 0; kill 1: had not left 30 s after it was to
  1 killed -> worker_left cause = frozen
  3 connects; 3 drains; wait 31; 3 killed -> kill 3; worker_left cause = frozen, frozen
the users own program has time from its first word (1-2, own_program)
  tick; 0 1 placed; wait 5000; 0 connects; wait 599 -> launch 0 1; read 0 1
  wait 5 -> dump 0; kill 0: not ready 600 s after its start; launch 2
one that has not asked may be importing and one that has must beat (1-2, heartbeat_timeout=2)
  tick; 0 1 connect; 0 1 silent; wait 4 -> launch 0 1
  0 1 ask; wait 1.5 -> world 1: 0 1; read 0 1
  1 beats; wait 0.4 -> nothing
  wait 0.2 -> broken 1 for 1; kill 0: no heartbeat for 2 s
a broken connection has nothing to do with importing (1-1, heartbeat_timeout=2)
  tick; 0 connects; 0 silent; 0 cut; wait 1.8; 0 connects; wait 4 -> launch 0; read 0
  0 cut; wait 2.2 -> read 0; kill 0: no connection for 2 s; launch 1

what the cluster did tells more than what came of it (1-4)
  for CAUSE in preempted, evicted, node_lost
  0-3 train; 1 drains; 2 fails itself: can't write; 3 silent; wait 10.5; 0 1 2 3 CAUSE
      -> worker_left cause = CAUSE, CAUSE, CAUSE, CAUSE
of several things that befell a worker one is its end (1-6)
  0-5 train; 0 killed: x; 1 clean -> worker_left cause = killed, crashed
  -> worker_left reason = killed: x, ended with exit code 0 before its training was complete
  2 drains: why; 2 deleted: x; 3 drains: why; 3 killed -> worker_left cause = ..., deleted, drained;
      worker_left reason = ..., deleted: x, why
  4 fails itself trained: no; 4 clean -> worker_left cause = ..., crashed; worker_left reason = ..., no
  5 silent; wait 310; 5 deleted -> worker_left cause = ..., frozen; worker_left reason = ..., no heartbeat for 300 s
one that has finished has finished whatever comes (1-2)
  0 1 train; 1 finishes; 1 evicted: x -> worker_left cause = finished; worker_left reason = finished

a program that ends well is told nothing if others take part or it was ready or is told to leave (1-4, own_program)
  tick; 0-3 placed; 1 2 3 connect; 0 clean -> phase = running
  1 asks; 1 clean; 2 drains; 2 clean -> phase = running
a program that has refused its arguments is not started again (1-2, own_program)
  tick; 0 crashed code 2: exit code 2: no -> reason = worker 0 has refused to train: exit code 2: no
the users own program may not fail after training (1-1, own_program)
  0 trains; 0 steps 30; 0 finishes; 0 crashed code 3: exit code 3
      -> end failed: worker 0 has left its training after step 30 and ended: exit code 3 ...
  -> worker_left reason = ended after step 30: exit code 3; warning = 0
the users own program may be taken away after training (1-1, own_program)
  for CAUSE in killed, preempted, node_lost, deleted
  0 trains; 0 steps 30; 0 finishes; 0 CAUSE -> end succeeded: training is complete;
      warning message = ...may not have been done
"""


@pytest.mark.parametrize("story", told_in(FLEETS))
def test_fleets(story):
    tell(story)


def test_crashes_in_training_have_a_budget_that_training_restores():
    play = Play(1, 1, **PATIENT)
    play.do("0 trains")
    crashes = CRASHES_IN_TRAINING - 1
    # Each time from the beginning. In the end each makes the same steps again, as where a script ends without a word behind its loop.
    for worker, steps in enumerate([*[2] * crashes, *[102] * crashes]):
        play.train_steps(worker, range(1, steps + 1))
        assert launched(play.do(f"{worker} crashed; leap {LONGEST_DELAY}")) == [worker + 1]
        play.do(f"{worker + 1} comes; leap 1")
    assert play.fact("phase") == "running"
    assert "10 workers crashed in training" in play.do(f"{worker + 1} crashed")[-1]


ACTIONS = st.sampled_from(["killed", "connects", "drains", "scale", "wait"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=25))
def test_levels_hold_whatever_happens(history):
    """Never more live workers than asked for, and after quiet time exactly as many as asked for."""
    play, maximum = Play(1, 4, **PATIENT), 4
    play.do("tick")
    for action, number in history:
        worker = play.job.fleet.next_id - 1 - number
        match action:
            case "scale":
                maximum = 1 + number
                play.do(f"scale 1-{maximum}")
            case "wait":
                play.do(f"leap {number}")
            case _ if worker >= 0:
                play.do(f"{worker} {action}")
        assert sum(record.state in LIVE for record in play.job.records.values()) <= maximum
    play.do(f"leap {LONGEST_DELAY + 1}")
    assert sum(record.state in LIVE for record in play.job.records.values()) == maximum
