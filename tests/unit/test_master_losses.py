"""How long replacements wait for what became of others, and what is said of that."""

import pytest
from play_kit import PATIENT, Play, launched, tell

from elasticdl.master.core.fleet import LONGEST_DELAY, LONGEST_OF_NODE
from elasticdl.master.core.values import CRASHES_IN_TRAINING
from tests.stories import told_in

BY_OTHERS = ("preempted", "evicted", "node_lost", "deleted", "killed")
TICK = 0.25

LOSSES = """
a replacement that reaches a world ends the row and the waiting of the others (1-2)
  tick; 0 1 evicted; leap 30; 2 3 evicted; leap 30; 4 5 evicted; leap 30; 6 7 evicted; leap 30; 8 9 evicted; leap 30;
      10 11 evicted; leap 30
  12 13 evicted; leap 60; 14 evicted: detail -> ...;
      reason = ...replacements wait 30 s: 15 workers in a row were lost before training, the last evicted: detail
  15 comes; wait 1 -> world 1: 15; launch 16; reason =
  16 evicted -> launch 17
a person sees why replacements wait and is told once (1-1)
  tick; 0 evicted; leap 1; 1 evicted; leap 1; 2 evicted -> ...; launch 2; reason = workers are starting
  leap 1; 3 evicted -> launch 3; reason = ...replacements wait 2 s...
  leap 2; 4 evicted -> launch 4; reason = ...replacements wait 4 s...
  leap 30; 5 evicted: detail; leap 30; 6 evicted; leap 30 -> reason = workers are starting
  -> warning message = replacements wait 8 s: 6 workers in a row were lost before training, the last evicted: detail
one that is lost while others wait shares their wait (1-2)
  tick; 0 evicted; 2 evicted; 1 killed; 3 evicted -> launch 0 1; launch 2; launch 3
  jump 0.6; tick -> launch 4
  wait 0.5 -> launch 5
a member is replaced at once though replacements of newcomers wait (1-3)
  0-2 train; 2 evicted; 0 1 ask broken; tick; 3 evicted; tick; 4 evicted; tick; 1 evicted; 0 asks broken; tick
      -> broken 1 for 0 1; world 2: 0 1; launch 3; launch 4; broken 2 for 0; world 3: 0;
      launch 5: in place of another: worker 1 evicted
replacements are kept off a node that loses one after another until a worker of it trains (1-2)
  tick; 1 evicted on n1; 2 evicted on n1; leap 1 -> launch 0 1; launch 2; launch away from n1 3
  3 placed on n1; 0 3 come; leap 1; 0 evicted on n2; 3 asks -> world 1: 0 3; broken 1 for 3; world 2: 3
  tick -> launch 4

newcomers that cannot start at once share a wait (1-3, heartbeat_timeout=1000)
  0 1 2 train
  0 steps 1 2; 1 leaves; 2 leaves; 0 asks; tick -> change 1 for 0 2; launch 3; launch 4; world 2: 0
  3 4 fail: data; 3 4 crashed; leap 1.3 -> launch 5; launch 6
  5 6 fail: data; 5 6 crashed; leap 1.3 -> launch 7; launch 8
  7 8 fail: data; 7 8 crashed; leap 2.6 -> launch 9; launch 10
  9 fails: data; 9 crashed; leap 1.9 -> nothing
a job that has too few without them fails for that reason and keeps its state (2-2)
  0 1 train
  0 steps 1 2; 1 leaves; 0 asks; tick -> change 1 for 0; launch 2
  2 fails: data; 2 crashed; leap 30; 3 fails: data; 3 crashed; leap 30; 4 fails: data; 4 crashed; leap 30 -> launch 3;
      launch 4; launch 5
  5 fails: data; 5 crashed; leap 30; 6 fails: data; 6 crashed; leap 30 -> launch 6; launch 7; phase = waiting
  7 fails: KeyError; 7 crashed -> stop with checkpoint 0: 6 workers in a row could not start, last worker 7: KeyError...

who runs for ten seconds without a session is shown with the command for its log (2-2, job_name=digits)
  tick; 0 comes; 1 placed on node-a; wait 9.9 -> launch 0 1; remark 1 =
  wait 60.3 -> nothing; remark 1 = runs on node-a, no session for 70 s, see its log: `elasticdl logs digits --worker 1`
  -> reason = 1 of at least 2 workers ready; worker_stuck = 0
  1 connects -> nothing; remark 1 =
a worker without a session is not blamed for a time in which the master was held up (2-2)
  tick; 0 comes; 1 placed on node-a; wait 1; jump 30; tick; wait 5 -> launch 0 1; remark 1 =
"""


@pytest.mark.parametrize("story", told_in(LOSSES))
def test_losses(story):
    tell(story)


def until_launched(play, events):
    """Seconds."""
    began, told = play.now, play.do(events)
    while not launched(told):
        told = play.do(f"jump {TICK}; tick")
    return play.now - began


def test_one_worker_after_another_that_gets_nowhere_is_replaced_later_and_later_of_each_cause_for_itself():
    play = Play(1, 1, **PATIENT)
    play.do("tick")
    for seconds in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert [until_launched(play, f"{play.newest} {cause}") for cause in BY_OTHERS] == [seconds] * len(BY_OTHERS)
    assert play.fact("phase") == "pending"


def test_workers_that_have_been_in_a_world_are_replaced_at_once_however_often():
    play = Play(1, 2, **PATIENT)
    play.do("0 1 train")
    for worker in range(1, 1 + 2 * CRASHES_IN_TRAINING):
        assert launched(play.do(f"{worker} evicted; 0 asks broken; tick")) == [worker + 1]
        play.do(f"{worker + 1} comes; leap 0.2; 0 asks; leap 2")
    assert play.fact("reason") == ""


def test_of_many_that_wait_one_tries_and_the_others_come_one_by_one_behind_it():
    play = Play(20, 20, **PATIENT)
    play.do("tick")
    while play.now < 60:
        lost = "; ".join(f"{worker} evicted" for worker in sorted(play.there)) or "tick"
        play.do(f"{lost}; jump {TICK}; tick")
    while not (first := launched(play.do(f"jump {TICK}; tick"))):
        pass
    together = [len(launched(play.do(f"jump {TICK}; tick"))) for _ in range(int(LONGEST_DELAY / TICK))]
    assert (len(first), sum(together), max(together)) == (1, 19, 1)


def test_where_there_is_no_other_node_it_is_tried_less_and_less_and_a_person_sees_it_who_may_scale_the_job():
    play = Play(1, 1, **PATIENT)
    play.do("tick")
    waits = [until_launched(play, f"{play.newest} evicted on n1") for _ in range(13)]
    assert waits == [0, 0.5, 1, 2, 4, 8, 16, 30, 32, 64, 128, 256, LONGEST_OF_NODE]
    play.do("13 evicted on n1: detail; leap 20")
    assert play.fact("reason").endswith(
        "14 workers in a row were lost on node n1 before training, the last evicted: detail; the node is avoided, and tried again in 280 s"
    )
    assert play.fact("warning message").endswith("the node is avoided, and tried again in 8 s")
    assert play.do("scale 1-2") == ["launch 14: in place of another: worker 13 evicted: detail", "launch 15: asked for"]


FAILS = {
    "in its first world": "{n} comes; 0 asks; {n} fails: other data; {n} crashed; 0 asks",
    "without a word": "{n} crashed: other data",
}


@pytest.mark.parametrize("kind", FAILS)
def test_a_newcomer_that_cannot_start_is_tried_later_and_later_and_does_not_end_the_job(kind):
    play = Play(1, 2, **PATIENT)
    play.do("0 1 train; 0 steps 1 2; 1 leaves; 0 asks; tick")
    for worker, delay in enumerate((0.0, 0.5, 1.0, 2.0, 4.0, 8.0), 2):
        assert until_launched(play, FAILS[kind].format(n=worker)) == pytest.approx(delay, abs=TICK)
    assert (play.newest, play.fact("phase")) == (8, "running")
    assert "replacements wait 8 s: 6 workers in a row could not start, the last: " in play.fact("warning message")
    play.do(FAILS[kind].format(n=8))
    assert "other data" in play.fact("reason")
    assert launched(play.do("0 killed; leap 0.1")) == [9], "the place of one that could train is filled"
    assert len(launched(play.do("scale 1-3"))) == 2
    assert "could not start" not in play.fact("reason")
