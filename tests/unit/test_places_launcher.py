"""The launcher over any places and any starter: who goes where, and what is told of it."""

import heapq
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticdl.master.state.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.places.base import FoundInPlace, Place, PlaceChanged, PlaceEnding, PlaceLost, PlaceState
from elasticdl.places.launcher import IDLE_SECONDS, KILL_SECONDS, PlaceLauncher, Seconds
from tests.contract.places_kit import FakePlaces, FakeStarter

READY, WAITING, ENDING = PlaceState.READY, PlaceState.WAITING, PlaceState.ENDING


class Clock:
    """Time passes when the test says so."""

    def __init__(self):
        self.now, self.numbers, self.timers = 0.0, itertools.count(), []

    def call_later(self, seconds, function):
        timer = Timer(function)
        heapq.heappush(self.timers, (self.now + seconds, next(self.numbers), timer))
        return timer

    def advance(self, seconds):
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self.timers)
            timer.run()
        self.now = end


class Timer:
    def __init__(self, function):
        self.function = function

    def cancel(self):
        self.function = None

    def run(self):
        if self.function:
            self.function()


class Scene:
    def __init__(self, *, at_once=True, **options):
        self.clock, self.reports = Clock(), []

        def make_places(report):
            self.places = FakePlaces(report)
            return self.places

        def make_starter(report):
            self.starter = FakeStarter(report, self.places, at_once)
            return self.starter

        self.launcher = PlaceLauncher(
            make_places, make_starter, self.reports.append, call_later=self.clock.call_later, **options
        )

    def launch(self, *ids, away_from=()):
        for worker_id in ids:
            now(self.launcher.launch(worker_id, away_from))

    def ready(self, *numbers, node="n1"):
        for number in numbers:
            self.places.change(f"place-{number}", READY, node)

    def new(self):
        """What was reported since."""
        new, self.reports[:] = list(self.reports), []
        return new


def now(coroutine):
    """The result of one that has nothing to wait for."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def placed(worker_id, place=0, node="n1"):
    return WorkerPlaced(worker_id, "host", 1000 + worker_id, node, f"place-{place}")


def test_a_worker_waits_for_a_place_and_is_told_why():
    scene = Scene()
    scene.launch(0, 1)
    assert scene.places.wants == [(1, frozenset()), (2, frozenset())]
    scene.places.change("place-1", reason="no node has a GPU free", node="n2")
    scene.places.change("place-1", reason="no node has a GPU free", node="n2")
    scene.places.change("place-0", reason="its image is pulled")
    assert scene.new() == [WorkerPending(1, "no node has a GPU free", "n2"), WorkerPending(0, "its image is pulled")]
    scene.ready(1)
    assert scene.new() == [placed(1, 1)]  # who has waited for it goes first: so both have the number of a pod
    scene.ready(0)
    assert scene.new() == [placed(0)]
    assert scene.starter.started == {0: "place-0", 1: "place-1"}


@pytest.mark.parametrize(("cause", "detail"), [(ExitCause.CRASHED, "3; its log: cat 0"), (ExitCause.KILLED, "3")])
def test_of_a_worker_that_has_crashed_it_is_told_where_its_log_is(cause, detail):
    scene = Scene()
    scene.launch(0)
    place = scene.places.places["place-0"] = Place("place-0", "n1", state=READY, log="cat 0")
    scene.places.report(PlaceChanged(place))
    scene.starter.report(WorkerExited(0, cause, 3, "3"))
    assert scene.new() == [placed(0), WorkerExited(0, cause, 3, detail)]


def test_a_worker_is_replaced_in_its_own_place():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.starter.exit(0, -9)
    assert scene.new() == [placed(0), WorkerExited(0, ExitCause.KILLED, -9)]
    scene.clock.advance(IDLE_SECONDS - 1)
    scene.launch(1)
    scene.clock.advance(10 * IDLE_SECONDS)
    assert scene.new() == [placed(1)]
    assert (list(scene.places.places), scene.places.wants, scene.places.given_back) == (
        ["place-0"],
        [(1, frozenset())],
        {},
    )


def test_a_place_that_had_a_worker_comes_first():
    scene = Scene()
    scene.launch(0, 1)
    scene.ready(1)
    scene.launcher.kill(1)  # while it waits for place-0, which comes all the same
    scene.places.places["place-0"] = Place("place-0")
    scene.ready(0)
    scene.starter.exit(0, 0)
    scene.launch(2)
    assert scene.starter.started == {2: "place-1"}


def test_an_idle_place_is_given_back_in_time():
    scene = Scene()
    scene.launch(0, 1)
    scene.ready(0, 1)
    scene.starter.exit(1, 0)
    scene.clock.advance(IDLE_SECONDS - 1)
    assert scene.places.given_back == {}
    scene.clock.advance(1)
    assert scene.places.given_back == {"place-1": False}
    assert scene.places.wants[-1] == (1, frozenset())


def test_a_place_that_its_worker_has_left_by_itself_is_given_back_sooner():
    scene = Scene(seconds=Seconds(left=1.0))
    scene.launch(0, 1, 2)
    scene.ready(0, 1, 2)
    scene.starter.exit(0, 0)
    scene.launcher.terminate(1)
    scene.starter.exit(2, -9)
    scene.clock.advance(1.0)
    assert scene.places.given_back == {"place-0": False, "place-1": False}
    scene.clock.advance(IDLE_SECONDS)
    assert list(scene.places.given_back) == ["place-0", "place-1", "place-2"]


def test_a_place_that_is_lost_before_it_was_there_ends_the_worker_that_waits_for_it():
    """Who launches then waits longer and longer, and avoids the node; a place that is asked for anew at once does not."""
    scene = Scene()
    scene.launch(0, 1)
    scene.places.change("place-1", node="n2")
    scene.places.lose("place-1", "rejected", ExitCause.EVICTED)
    assert scene.new() == [WorkerExited(1, ExitCause.EVICTED, -9, "rejected", node="n2")]
    assert scene.places.in_state(WAITING) == ["place-0"]


def test_who_is_not_wanted_any_more_before_there_is_a_place_costs_none():
    scene = Scene()
    scene.launch(0, 1)
    scene.launcher.terminate(0)
    assert scene.new() == [WorkerExited(0, ExitCause.KILLED, -9, "it had no place yet")]
    assert list(scene.places.places) == ["place-0"]
    scene.ready(0)
    assert scene.new() == [placed(1)]


@pytest.mark.parametrize("idle", [False, True])
def test_a_worker_stays_away_from_a_node_if_there_is_another(idle):
    scene = Scene()
    scene.launch(0)
    scene.ready(0, node="slow")
    if idle:
        scene.starter.exit(0, -9)
    scene.launch(1, away_from=["slow"])
    assert scene.places.wants[-1] == (1 if idle else 2, frozenset({"slow"}))
    assert scene.places.given_back == ({"place-0": False} if idle else {})
    scene.ready(1, node="slow")  # there is no other
    assert scene.starter.started[1] == "place-1"


def test_a_place_that_is_lost_takes_its_worker_along_with_its_cause():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.new()
    scene.places.lose("place-0", "for job/other", ExitCause.PREEMPTED, 143)
    assert scene.new() == [WorkerExited(0, ExitCause.PREEMPTED, 143, "for job/other")]
    assert scene.starter.started == {}
    scene.launch(1)
    assert scene.places.in_state(WAITING) == ["place-1"]


@pytest.mark.parametrize("by_starter", [False, True])
@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (ExitCause.PREEMPTED, (ExitCause.PREEMPTED, 0, "for job/other")),
        (ExitCause.KILLED, (ExitCause.CLEAN, 0, "")),  # the process knows better
    ],
)
def test_the_end_of_a_worker_in_a_place_that_ends_waits_for_the_place_s(by_starter, cause, told):
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.new()
    if by_starter:
        scene.starter.report(PlaceEnding("place-0", "SIGTERM"))
    else:
        scene.places.change("place-0", ENDING, "n1")
    scene.starter.exit(0, 0)
    assert scene.new() == []
    scene.launch(1)
    assert scene.starter.started == {}
    scene.places.lose("place-0", "for job/other", cause, 143)
    assert scene.new() == [WorkerExited(0, *told)]


def test_a_place_that_goes_on_after_all_lets_its_worker_s_end_be_told():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.places.change("place-0", ENDING, reason="its node does not answer")
    scene.starter.exit(0, 3)
    scene.new()
    scene.launch(1)
    scene.ready(0)
    assert scene.new() == [WorkerExited(0, ExitCause.CRASHED, 3), placed(1)]


def test_a_worker_that_can_not_be_killed_loses_its_place():
    scene = Scene(at_once=False)
    scene.launch(0)
    scene.ready(0)
    scene.launcher.kill(0)
    scene.clock.advance(KILL_SECONDS - 1)
    assert (scene.starter.asked_to_end, scene.places.given_back) == ([(0, 0.0)], {})
    scene.clock.advance(1)
    assert scene.places.given_back == {"place-0": True}
    scene.places.lose("place-0", "gone by force")
    assert scene.new() == [WorkerExited(0, ExitCause.KILLED, -9, "gone by force")]


def test_a_worker_that_has_not_begun_does_not_wait_for_a_node_to_come_back():
    """Which may take minutes, as of one that is lost together with the master, and nobody has noticed."""
    scene = Scene(at_once=False)
    scene.launch(0, 1)
    scene.ready(0, 1)
    scene.starter.placed(0)
    for number in range(2):
        scene.places.change(f"place-{number}", ENDING, "n1", "its node does not answer")
    scene.clock.advance(KILL_SECONDS - 1)
    assert scene.places.given_back == {}
    scene.clock.advance(1)
    assert scene.places.given_back == {"place-1": True}
    scene.new()
    scene.places.lose("place-1", "as told", ExitCause.KILLED)
    assert scene.new() == [WorkerExited(1, ExitCause.NODE_LOST, -9, "its node does not answer")]


def test_a_worker_that_does_not_start_loses_its_place():
    scene = Scene(at_once=False, seconds=Seconds(start=600.0))
    scene.launch(0, 1, 2)
    scene.ready(0, 1, 2)
    scene.starter.placed(0)
    scene.starter.exit(2, 1)
    scene.launch(3)  # in whose place the time has begun anew
    scene.clock.advance(599)
    assert scene.places.given_back == {}
    scene.starter.placed(3)
    scene.clock.advance(1)
    assert scene.places.given_back == {"place-1": True}
    scene.new()
    scene.places.lose("place-1", "as told", ExitCause.KILLED)
    assert scene.new() == [WorkerExited(1, ExitCause.NODE_LOST, -9, "it was not started within 600 s")]


def test_a_worker_that_is_killed_in_a_place_that_ends_loses_it_at_once():
    """Nobody may hear the order there any more."""
    scene = Scene(at_once=False)
    scene.launch(0)
    scene.ready(0)
    scene.starter.placed(0)
    scene.places.change("place-0", ENDING, "n1", "its node does not answer")
    scene.launcher.kill(0)
    scene.clock.advance(0.0)
    assert scene.places.given_back == {"place-0": True}


def test_a_worker_that_ends_when_it_is_killed_leaves_its_place_to_the_next():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.launcher.kill(0)
    scene.launch(1)
    scene.clock.advance(KILL_SECONDS)
    assert (scene.starter.started, scene.places.given_back) == ({1: "place-0"}, {})


def test_a_worker_that_nobody_has_launched_is_killed():
    scene = Scene()
    scene.starter.report(WorkerPlaced(7, "host", 1))
    assert scene.starter.asked_to_end == [(7, 0.0)]
    assert scene.new() == []


def test_what_cannot_be_mended_is_passed_on():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.new()
    scene.places.report(LauncherFailed("the image is not there"))
    for read in (scene.launcher.read_stacks, scene.launcher.read_log):
        read(0)
        read(7)
    assert scene.new() == [LauncherFailed("the image is not there"), StacksFound(0, ""), StacksFound(0, "")]


def test_another_master_takes_over_what_it_finds():
    scene = Scene()
    scene.places.left = (
        Place("a", "n1", state=READY),
        Place("b", "n2", state=ENDING),
        Place("c", "n1", state=READY),
        Place("d", state=WAITING, reason="full"),
    )
    scene.starter.left = tuple(
        FoundInPlace(place, FoundWorker(worker_id, "host", 1)) for place, worker_id in (("a", 3), ("b", 4))
    )
    found = now(scene.launcher.find({}))
    assert found == [
        FoundWorker(3, "host", 1, node="n1", place="a"),
        FoundWorker(4, "host", 1, doubtful=True, node="n2", place="b"),
    ]
    with pytest.raises(ValueError, match="4"):
        scene.launch(4)
    scene.clock.advance(0)
    assert scene.places.in_state(WAITING) == ["d"], "who waited in it is launched anew, and keeps its turn in the queue"
    scene.launch(5)
    assert scene.starter.started == {3: "a", 4: "b", 5: "c"}
    assert scene.places.in_state(WAITING) == ["d"]
    scene.clock.advance(IDLE_SECONDS)
    assert scene.places.in_state(WAITING) == [], "nobody is to come"
    assert scene.places.wants[-1] == (2, frozenset())
    scene.new()
    scene.places.lose("b", "drained", ExitCause.EVICTED, 143)
    assert scene.new() == [WorkerExited(4, ExitCause.EVICTED, 143, "drained")]


def test_of_a_worker_whose_place_was_lost_in_the_absence_the_next_master_hears_why():
    scene = Scene()
    scene.places.left = (Place("a", "n1", state=PlaceState.LOST), Place("b", "n1", state=PlaceState.LOST))
    assert now(scene.launcher.find({3: "a", 4: "", 5: "gone without a trace"})) == [
        FoundWorker(3, over=True, doubtful=True, node="n1", place="a")
    ]
    scene.places.lose("a", "for another job", ExitCause.PREEMPTED, -9)
    scene.places.lose("b", "as told", ExitCause.KILLED, -9)
    scene.clock.advance(0)
    assert scene.new() == [WorkerExited(3, ExitCause.PREEMPTED, -9, "for another job")]
    assert scene.places.given_back == {}


def found_two_in_a_place():
    """The end of one was not told to the earlier master, and another runs in its place."""
    scene = Scene(at_once=False)
    scene.places.left = (Place("a", "n1", state=READY),)
    over, running = FoundWorker(3, "host", 0, over=True), FoundWorker(4, "host", 1)
    scene.starter.left = (FoundInPlace("a", over), FoundInPlace("a", running))
    now(scene.launcher.find({}))
    scene.clock.advance(0)
    return scene


def test_of_two_workers_that_were_found_in_a_place_both_ends_are_told():
    scene = found_two_in_a_place()
    scene.places.change("a", ENDING, "n1")
    scene.starter.report(WorkerExited(3, ExitCause.CRASHED, 1))
    assert scene.new() == [WorkerExited(3, ExitCause.CRASHED, 1)], "it did not end with the place"
    scene.starter.report(WorkerExited(4, ExitCause.KILLED, -15))
    assert scene.new() == []
    scene.places.lose("a", "drained", ExitCause.EVICTED, 143)
    assert scene.new() == [WorkerExited(4, ExitCause.EVICTED, -15, "drained")]


def test_of_two_workers_that_were_found_in_a_place_both_are_lost_with_it():
    scene = found_two_in_a_place()
    scene.places.lose("a", "gone", ExitCause.NODE_LOST, -9)
    assert [exited.worker_id for exited in scene.new()] == [3, 4]


def test_a_master_that_leaves_ends_nobody():
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.new()
    now(scene.launcher.detach())
    now(scene.launcher.close())
    scene.clock.advance(100)
    assert (scene.starter.started, scene.places.given_back, scene.new()) == ({0: "place-0"}, {}, [])


NODES = st.sampled_from(["n1", "n2"])


def test_what_becomes_of_workers_after_a_master_has_left_is_for_the_next_to_tell():
    """Else the master would save it, with replacements that nobody has launched."""
    scene = Scene()
    scene.launch(0)
    scene.ready(0)
    scene.new()
    now(scene.launcher.detach())
    scene.launch(1)
    scene.places.lose("place-0", "for another job", ExitCause.PREEMPTED, -9)
    assert scene.new() == []


CAUSES = st.sampled_from([ExitCause.PREEMPTED, ExitCause.NODE_LOST, ExitCause.KILLED, ExitCause.CRASHED])


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens to places and workers, in any order: the starter's asserts hold, and these."""

    def __init__(self):
        super().__init__()
        self.scene = Scene(at_once=False, seconds=Seconds(start=KILL_SECONDS + IDLE_SECONDS))
        self.launched = 0

    @property
    def exits(self):
        return [report.worker_id for report in self.scene.reports if isinstance(report, WorkerExited)]

    def one_of(self, data, things):
        return data.draw(st.sampled_from(sorted(things)))

    @rule(away_from=st.lists(st.sampled_from(["n1", "n2"]), unique=True))
    def launch(self, away_from):
        self.scene.launch(self.launched, away_from=away_from)
        self.launched += 1

    @precondition(lambda self: self.launched)
    @rule(data=st.data(), kill=st.booleans())
    def end(self, data, kill):
        launcher = self.scene.launcher
        (launcher.kill if kill else launcher.terminate)(data.draw(st.integers(0, self.launched)))

    @precondition(lambda self: self.scene.places.places)
    @rule(data=st.data(), node=NODES, state=st.sampled_from([READY, READY, ENDING]))
    def place_changes(self, data, node, state):
        self.scene.places.change(self.one_of(data, self.scene.places.places), state, node)

    @precondition(lambda self: self.scene.places.in_state(WAITING))
    @rule(data=st.data(), reason=st.sampled_from(["", "full", "it is pulled"]))
    def place_waits(self, data, reason):
        self.scene.places.change(self.one_of(data, self.scene.places.in_state(WAITING)), reason=reason)

    @precondition(lambda self: self.scene.starter.started)
    @rule(data=st.data())
    def starter_is_told_to_end(self, data):
        place_id = self.scene.starter.started[self.one_of(data, self.scene.starter.started)]
        self.scene.starter.report(PlaceEnding(place_id, "SIGTERM"))

    @precondition(lambda self: self.scene.places.places or self.scene.places.given_back)
    @rule(data=st.data(), cause=CAUSES, twice=st.booleans())
    def place_is_lost(self, data, cause, twice):
        place_id = self.one_of(data, {*self.scene.places.places, *self.scene.places.given_back})
        self.scene.places.lose(place_id, "gone", cause)
        if twice:
            self.scene.places.report(PlaceLost(place_id, cause, 1))

    @precondition(lambda self: self.scene.starter.started)
    @rule(data=st.data())
    def worker_is_placed(self, data):
        self.scene.starter.placed(self.one_of(data, self.scene.starter.started))

    @precondition(lambda self: self.scene.starter.started)
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9, -15]), twice=st.booleans())
    def worker_ends(self, data, code, twice):
        worker_id = self.one_of(data, self.scene.starter.started)
        self.scene.starter.exit(worker_id, code)
        if twice:
            self.scene.starter.report(WorkerExited(worker_id, ExitCause.CRASHED, 1))

    @rule(seconds=st.sampled_from([KILL_SECONDS, IDLE_SECONDS]))
    def time_passes(self, seconds):
        self.scene.clock.advance(seconds)

    @invariant()
    def each_pending_worker_has_one_waiting_place(self):
        started = {worker for worker, spot in self.scene.launcher._pairing.workers.items() if spot.spot}
        pending = self.launched - len(started) - len(self.exits)
        assert len(self.scene.places.in_state(WAITING)) == pending

    @invariant()
    def nobody_ends_twice(self):
        assert len(self.exits) == len(set(self.exits))

    def teardown(self):
        now(self.scene.launcher.close())
        assert sorted(self.exits) == list(range(self.launched))
        assert (self.scene.places.places, self.scene.places.given_back, self.scene.starter.started) == ({}, {}, {})
        self.scene.clock.advance(1000)
        assert self.scene.places.places == {}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
