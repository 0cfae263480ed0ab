"""Who is taken to be stuck, when that is said, and who is given up for it."""

import pytest
from play_kit import Play, tell

from elasticdl.job import messages as m
from elasticdl.master.core.rule import GIVE_UP, UNLEARNT_NAME, ProgressLimits
from elasticdl.master.core.worker_record import Pulse
from tests.stories import told_in

STUCK = """
the one that does not wait is named with its line and replaced (2-3)
  0-2 learn; 0 1 wait; 2 stands; wait 10.3 -> dump 2
  2 shows: train.py:31 in load; wait 1 -> nothing; worker_stuck worker = 2; worker_stuck where = train.py:31 in load
  -> worker_stuck host = h; remark 2 = stuck for 11 s, at train.py:31 in load
  2 answers: train.py:31 in load; wait 300 -> dump 2; broken 1 for 0 1;
      kill 2: no progress for 301..., at train.py:31 in load; launch 3
  -> worker_stuck = 1
who moves is not killed until it is found to hang (2-3)
  0-2 learn; 0 1 wait; 2 stands; wait 10.3; 2 shows: train.py:31 in load; 2 answers moving: train.py:80 in validate;
      wait 300 -> dump 2; dump 2
  2 answers: train.py:85 in save; wait 61 -> dump 2; broken 1 for 0 1; kill 2: ..., at train.py:85 in save; launch 3;
      worker_stuck where = ..., train.py:85 in save
one that does not answer is looked at by its launcher and what it says itself counts for more (2-3)
  0-2 learn; 0 1 wait; 2 stands; wait 10.3; wait 2.7 -> dump 2; read 2
  2 seen session: its process runs; wait 0.1 -> remark 2 = ...its process runs
  2 shows moving: train.py:80 in validate; 2 answers moving after 2.5: train.py:80 in validate; wait 300 -> dump 2
who sends heartbeats and does not answer is asked once more (2-3)
  0-2 learn; 0 1 wait; 2 stands; wait 302 -> dump 2; read 2; dump 2
  wait 2 -> read 2; broken 1 for 0 1; kill 2
one whose stack moves is named later and not killed for an hour (2-3)
  0-2 learn; 0 1 wait; 2 stands; wait 10.3; 2 shows moving: train.py:80 in validate; wait 290.5 -> dump 2; dump 2
  2 shows moving: train.py:81 in validate; 2 answers moving: train.py:80 in validate; wait 3000 -> ...;
      worker_stuck where = train.py:81 in validate
  wait 600 -> ...; broken 1 for 0 1; kill 2; ...
if all are stuck at once their state is not thrown away (2-3)
  0-2 learn; 0-2 stand; wait 360 -> dump 0 1 2; read 0 1 2; dump 0 1 2; read 0 1 2
while some have returned another may be writing the result of a script (2-3)
  0-2 learn; 1 2 wait; 0 stands; 1 2 beat ending; wait 119 -> nothing
  wait 2 -> dump 0
  0 shows: train.py:90 in export; wait 178 -> nothing

who stays in a world that nobody else knows is given up (1-1, progress_timeout=10)
  tick; 0 connects world 5; 0 stands; wait 15 -> launch 0; broken 5 for 0; dump 0; kill 0: no progress for 10 s; launch 1

of a silent worker its launcher tells before it is killed (2-3, progress_timeout=10)
  0-2 train; 2 silent; wait 7.5 -> read 2
  2 seen: does not run: it is stopped (state T) -> remark 2 = no heartbeat for ...
  wait 3 -> broken 1 for 0 1; kill 2: no heartbeat for 10 s, does not run: it is stopped (state T)
  2 goes; wait 1 -> launch 3
  2 killed -> worker_left cause = frozen;
      worker_left reason = no heartbeat for 10 s, does not run: it is stopped (state T)
  -> worker_stuck why = no heartbeat
all who hold the state are not killed for a call that holds pythons lock (2-3)
  0-2 train; 0 silent; wait 0.7; 1 silent; wait 0.7; 2 silent; wait 58 -> read 0 1 2; worker_stuck worker = 0, 1, 2
  wait 2 -> nothing; remark 0 = no heartbeat for 6...
  0 seen 3 -> worker_stuck where = ..., /job/train.py:3 in load
  0-2 go; wait 1 -> nothing; remark 0 =; remark 1 =; remark 2 =
  0-2 silent; wait 301 -> read 0 1 2; kill 0 1 2: no heartbeat for 300 s; ...

collectives that take long are waited for (2-3)
  0-2 learn; 0-2 wait; wait 15 -> dump 0 1 2; read 0 1 2
  0-2 go; wait 1; 0-2 wait; wait 15; 0-2 go; wait 1; 0-2 wait; wait 15 -> nothing
  0-2 go; wait 1; 0-2 wait; wait 320 -> dump 0 1 2; ...; broken 1 for 0 1 2; longest = 1...
what a master was away for while all waited teaches nothing (2-3)
  0-2 learn; 0-2 wait; wait 1; jump 100; tick; 0-2 go; wait 1 -> longest = 1
"""


@pytest.mark.parametrize("story", told_in(STUCK))
def test_stuck(story):
    tell(story)


# ---- all wait ----

STEP, LOG = "train.py:9 in step", "train.py:20 in log"


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([(STEP, 7), (STEP, 7), (LOG, 6)], [2]),  # it is behind
        ([(STEP, 5), (LOG, 7), (STEP, 5)], [1]),  # it left one out
        ([(STEP, 7), (LOG, 7), (STEP, 7)], [1]),  # it stands elsewhere
        ([(STEP, 7)] * 3, []),
        ([(STEP, 0), (LOG, 0)], [0, 1]),  # nobody can tell who is wrong
        ([(STEP, 0)] * 6 + [(LOG, 0)] * 6, list(range(8))),  # and some of many are enough
    ],
)
def test_if_all_wait_who_does_something_else_is_named_and_the_world_is_left(places, named):
    play, all_of_them = Play(1, len(places), progress_timeout=10.0), f"0-{len(places) - 1}"
    ids = " ".join(str(each) for each in range(len(places)))
    assert play.do(f"{all_of_them} train; {all_of_them} wait; wait 10.5")[-1] == f"dump {ids}"
    for worker, (where, collectives) in enumerate(places):
        play.do(f"{worker} shows begun {collectives}: {where}")
    (broken,) = play.do("wait 1")
    assert broken.startswith(f"broken 1 for {ids}: ")
    assert [record["worker"] for record in play.records("worker_stuck")] == named
    assert (f"worker {named[0]}, at {LOG}" in broken) == (len(named) == 1) if named else ": worker" not in broken
    assert broken.endswith("; and 4 more") == (len(places) == 12)


# ---- limits ----


@pytest.mark.parametrize(("longest", "named"), [(0.1, 10.0), (4.0, 20.0), (30.0, 150.0), (90.0, 300.0)])
def test_later_naming_follows_the_longest_gap_and_after_the_last_step_nothing_is_known(longest, named):
    def step(number, epoch, total=0):
        patience.stepped((m.StepReport(number, epoch, 0.5, 1, 0.1, 0.1, 1, 1, True),), total, longest)

    patience, pulse = ProgressLimits(None), Pulse(0.0, 0.0, steps=10)
    patience.moved(pulse, longest)
    pulse.heard = longest + 1.0
    step(0, 0)
    assert patience.until_named(pulse) == UNLEARNT_NAME, "no epoch is over"
    step(1, 1)
    assert (patience.until_named(pulse), patience.until_given_up) == (named, GIVE_UP)
    newcomer = Pulse(0.0, 0.0, steps=1)
    patience.moved(newcomer, 200.0)
    assert (patience.until_named(newcomer), patience.longest) == (UNLEARNT_NAME, longest), "it may compile"
    step(50, 3, total=50)
    assert patience.until_named(pulse) == UNLEARNT_NAME
