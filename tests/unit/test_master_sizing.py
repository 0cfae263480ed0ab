"""A job that knows how it scales: what it says, how many workers it asks for, and what of that outlives it."""

from __future__ import annotations

import json

import pytest
from play_kit import Play

from elasticdl.job.journal import KINDS
from elasticdl.master.core.sizing import FIRST_SECONDS
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.calls import to_status


class Sized(Play):
    """It has lived for a moment."""

    def __init__(self, minimum, maximum, policy="efficiency"):
        super().__init__(minimum, maximum, obedient=True, scale_policy=policy, min_efficiency=0.6)
        self.wait(5)

    @property
    def sizes(self):
        return [len(self.worlds[version]) for version in sorted(self.worlds)]

    def takes(self, seconds, count=30):
        """The members of the present world tell of so many steps, each of so many seconds."""
        first = self.job.training.step
        self.train_steps(
            self.worlds[max(self.worlds)][0], range(first + 1, first + count + 1), seconds=seconds, samples=64, total=0
        )

    def learns(self, efficiency, count=30):
        """Each member does that part of what one does alone in a second."""
        self.takes(1.0 / (len(self.worlds[max(self.worlds)]) * efficiency), count)
        self.wait(FIRST_SECONDS + 6)

    def until(self, asked_for, seconds=0.1):
        """Nobody does anything but the master, until it asks for so many."""
        while self.newest + 1 < asked_for:
            self.do(f"jump {seconds}; tick")
        self.there.discard(self.newest)
        self.do(f"{self.newest} pend: no place")


# ---- what it says ----


def test_of_one_number_of_workers_nothing_of_others_is_known():
    play = Sized(2, 2, "all")
    play.learns(0.9)
    (first,) = play.records("advice")
    assert first == {"text": "only 2 workers were measured, so what fewer or more would do is not known", "curve": []}


def test_what_was_measured_is_said_again_only_when_it_changes():
    play = Sized(1, 2, "all")
    play.do("scale 1; wait 5")
    play.learns(1.0)
    assert not play.records("advice"), "one worker says nothing of more"
    play.do("scale 2; wait 5")
    play.learns(0.9)
    (first,) = play.records("advice")
    said = "2 workers do 1.8 times the work of one (each does 0.90 of one worker, measured); one more"
    assert first["text"].startswith(said)
    assert first["curve"][1] == {"workers": 2, "speedup": 1.8, "measured": True}
    json.dumps(first)
    play.wait(40)
    play.learns(0.88, count=200)
    play.wait(60)
    assert (len(play.records("advice")), "each does 0.88" in play.fact("advice")) == (1, True)
    play.learns(0.7, count=200)
    play.wait(60)
    told = [each["text"][:16] for each in play.records("advice")]
    assert told == ["2 workers do 1.8", "2 workers do 1.4"], "not often"
    status = to_status("job", play.job, play.now, 1.0)
    assert (status.advice, status.decision) == (play.fact("advice"), "")
    assert {"advice", "decision"} <= KINDS.keys()


def test_it_looks_seldom_and_at_once_when_the_range_is_another():
    play = Sized(2, 2, "all")
    play.takes(0.5)
    play.wait(FIRST_SECONDS - 1)
    assert not play.fact("advice")
    play.wait(2)
    assert play.fact("advice")
    play.wait(200)  # it would look again after up to a minute
    play.takes(1.0, count=200)
    play.do("wait 1; scale 1-2; wait 1")
    assert play.job.size._steps._known[2][1].seconds == pytest.approx(1.0)


# ---- how many workers it asks for ----


def test_it_grows_as_long_as_that_pays_and_goes_back_if_not():
    play = Sized(1, 8)
    for efficiency in (1.0, 0.75, 0.5):
        play.learns(efficiency)
    assert (play.sizes, play.fact("decision workers")) == ([1, 2, 3, 2], "2, 3, 2")
    left = play.records("decision")[-1]["reason"]
    assert left == "goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6"
    assert play.fact("worker_draining reason") == left
    play.learns(0.75)
    assert play.fact("decision").startswith("stays at 2: of 3 workers each did 0.50")


def test_what_was_learnt_of_another_number_decides_nothing():
    """Meanwhile a worker was lost."""
    play = Sized(1, 4)
    play.learns(1.0)
    play.takes(0.5)
    play.do("1 killed")
    play.until(3)
    play.wait(20)
    assert (play.sizes[-1], play.fact("target")) == (1, "2")


def test_as_long_as_there_is_no_place_it_asks_for_no_more():
    play = Sized(1, 8)
    play.takes(1.0)
    play.until(2, seconds=1.0)
    play.learns(1.0)
    assert (play.fact("target"), play.newest) == ("2", 1)


def test_the_users_range_is_kept_and_a_reason_of_another_range_is_not_shown():
    play = Sized(1, 8)
    play.do("scale 3-4; wait 5")
    play.learns(0.99)
    play.learns(0.99)
    assert (play.sizes, play.fact("decision")) == ([1, 3, 4], "stays at 4: --num_workers allows no more")
    play.do("scale 1-2")
    assert play.records("decision")[-1] == {"workers": 2, "reason": "goes to 2: the job was scaled to 1-2"}
    play.wait(5)
    assert play.sizes[-1] == 2
    play.do("scale 1-4")
    assert play.fact("decision") == "stays at 2: the job was scaled to 1-4, and nothing was measured since"
    play.do("scale 1")
    assert play.records("decision")[-1] == {"workers": 1, "reason": "goes to 1: the job was scaled to 1"}


# ---- what outlives it ----


def test_another_master_goes_on_with_the_target_and_measures_anew():
    play = Sized(1, 8)
    play.learns(1.0)
    play.learns(0.9)
    assert play.sizes == [1, 2, 4]
    play.do("die; rise; wait 10")
    snapshot = play.job.snapshot()
    assert (snapshot.target, play.fact("advice")) == (4, "")
    assert Snapshot.from_json(Snapshot(snapshot, 0.0).to_json()).job == snapshot
    play.learns(0.9)
    assert play.fact("decision") == "tries 5: how the job scales is not known yet"


def test_another_master_that_begins_with_the_most_workers_finds_out_whether_they_pay():
    play = Sized(1, 2)
    play.learns(1.0)
    play.do("die; rise; wait 10")
    play.learns(0.5)
    assert (play.sizes[-1], play.records("decision")[-1]["workers"]) == (1, 1)
    play.learns(1.0)
    assert (play.fact("target"), play.fact("decision")[:12]) == ("1", "stays at 1: ")
