"""The launcher over any places and any starter: who goes where, and what is told of it."""

import pytest
from places_scene import ENDING, READY, WAITING, Scene, now, placed

from elasticdl.master.core.events import (
    ExitCause,
    FoundWorker,
    LauncherFailed,
    StacksFound,
    WorkerExited,
    WorkerPending,
    WorkerPlaced,
)
from elasticdl.places.base import Place, PlaceChanged, PlaceEnding, PlacesRefused, PlaceState
from elasticdl.places.launcher import IDLE_SECONDS, KILL_SECONDS, Seconds


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


def test_a_worker_for_which_no_place_can_be_had_is_told_why():
    s = Scene()
    s.places.want = lambda most, avoid: None
    s.launch(0, 1)
    s.places.report(PlacesRefused("no more batch jobs for you"))
    s.launch(2)
    assert s.reports == [WorkerPending(number, "no more batch jobs for you") for number in range(3)]
    s.places.report(PlacesRefused(""))
    s.launch(3)
    assert len(s.reports) == 3


@pytest.mark.parametrize(("cause", "detail"), [(ExitCause.CRASHED, "3; its log: cat 0"), (ExitCause.KILLED, "3")])
def test_of_a_worker_that_has_crashed_it_is_told_where_its_log_is(cause, detail):
    scene = Scene()
    scene.launch(0)
    place = scene.places.places["place-0"] = Place("place-0", "n1", state=READY, log="cat 0")
    scene.places.report(PlaceChanged(place))
    scene.starter.report(WorkerExited(0, cause, 3, "3"))
    assert scene.new() == [placed(0), WorkerExited(0, cause, 3, detail)]


def test_a_worker_is_replaced_in_its_own_place():
    scene = Scene().placed(1)
    scene.starter.exit(0, -9)
    assert scene.new() == [WorkerExited(0, ExitCause.KILLED, -9)]
    scene.clock.advance(IDLE_SECONDS - 1)
    scene.launch(1)
    scene.launcher.kill(1)
    scene.launch(2)
    scene.clock.advance(10 * IDLE_SECONDS)
    assert scene.starter.started == {2: "place-0"}
    assert (scene.places.wants, scene.places.given_back) == ([(1, frozenset())], {})


def test_an_idle_place_is_given_back_in_time():
    scene = Scene().placed(4)
    scene.starter.exit(0, 0)
    scene.launcher.terminate(1)
    scene.starter.exit(2, -9)
    scene.clock.advance(IDLE_SECONDS - 1)
    assert scene.places.given_back == {}
    scene.clock.advance(1)
    assert list(scene.places.given_back) == ["place-0", "place-1", "place-2"]
    assert scene.places.wants[-1] == (1, frozenset())


def test_a_place_that_is_lost_before_it_was_there_ends_the_worker_that_waits_for_it():
    """Who launches then waits longer and longer, and avoids the node; a place that is asked for anew at once does not."""
    scene = Scene()
    scene.launch(0, 1)
    scene.places.change("place-1", node="n2")
    scene.places.lose("place-1", "rejected", ExitCause.EVICTED)
    assert scene.new() == [WorkerExited(1, ExitCause.EVICTED, -9, "rejected", node="n2")]
    assert scene.places.in_state(WAITING) == ["place-0"]


@pytest.mark.parametrize("idle", [False, True])
def test_a_worker_stays_away_from_a_node_if_there_is_another(idle):
    scene = Scene().placed(1, node="slow")
    if idle:
        scene.starter.exit(0, -9)
    scene.launch(1, away_from=["slow"])
    assert scene.places.wants[-1] == (1 if idle else 2, frozenset({"slow"}))
    assert scene.places.given_back == ({"place-0": False} if idle else {})
    scene.ready(1, node="slow")  # there is no other
    assert scene.starter.started[1] == "place-1"


@pytest.mark.parametrize("by_starter", [False, True])
@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (ExitCause.PREEMPTED, (ExitCause.PREEMPTED, 0, "for job/other")),
        (ExitCause.KILLED, (ExitCause.CLEAN, 0, "")),  # the process knows better
    ],
)
def test_the_end_of_a_worker_in_a_place_that_ends_waits_for_the_place_s(by_starter, cause, told):
    scene = Scene().placed(1)
    if by_starter:
        scene.starter.report(PlaceEnding("place-0"))
    else:
        scene.places.change("place-0", ENDING, "n1")
    scene.starter.exit(0, 0)
    assert scene.new() == []
    scene.launch(1)
    assert scene.starter.started == {}
    scene.places.lose("place-0", "for job/other", cause, 143)
    assert scene.new() == [WorkerExited(0, *told)]


def test_a_place_that_goes_on_after_all_lets_its_worker_s_end_be_told():
    scene = Scene().placed(1)
    scene.places.change("place-0", ENDING, reason="its node does not answer")
    scene.starter.exit(0, 3)
    scene.new()
    scene.launch(1)
    scene.ready(0)
    assert scene.new() == [WorkerExited(0, ExitCause.CRASHED, 3), placed(1)]


@pytest.mark.parametrize("ends", [False, True])  # where nobody may hear the order any more
def test_a_worker_that_can_not_be_killed_loses_its_place_and_at_once_if_that_ends(ends):
    scene = Scene(at_once=False).placed(1)
    scene.starter.placed(0)
    if ends:
        scene.places.change("place-0", ENDING, "n1", "its node does not answer")
    scene.new()
    scene.launcher.kill(0)
    scene.clock.advance(0.0 if ends else KILL_SECONDS - 1)
    assert scene.places.given_back == ({"place-0": True} if ends else {})
    scene.clock.advance(1)
    assert (scene.starter.asked_to_end, scene.places.given_back) == ([(0, 0.0)], {"place-0": True})
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


def test_a_worker_that_nobody_has_launched_is_killed():
    scene = Scene()
    scene.starter.report(WorkerPlaced(7, "host", 1))
    assert (scene.starter.asked_to_end, scene.new()) == ([(7, 0.0)], [])


def test_what_cannot_be_mended_is_passed_on():
    scene = Scene().placed(1)
    scene.places.report(LauncherFailed("the image is not there"))
    scene.launcher.read_stacks(0)
    scene.launcher.read_stacks(7)
    assert scene.new() == [LauncherFailed("the image is not there"), StacksFound(0, "")]


def test_another_master_takes_over_what_it_finds():
    scene = Scene()
    scene.places.left = (
        Place("a", "n1", state=READY),
        Place("b", "n2", state=ENDING),
        Place("c", "n1", state=READY),
        Place("d", state=WAITING, reason="full"),
    )
    scene.starter.left = tuple(
        FoundWorker(worker_id, "host", 1, place=place) for place, worker_id in (("a", 3), ("b", 4))
    )
    found = now(scene.launcher.find({}))
    assert found == [
        FoundWorker(3, "host", 1, node="n1", place="a"),
        FoundWorker(4, "host", 1, node="n2", place="b"),
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
        FoundWorker(3, over=True, node="n1", place="a")
    ]
    scene.places.lose("a", "for another job", ExitCause.PREEMPTED, -9)
    scene.places.lose("b", "as told", ExitCause.KILLED, -9)
    scene.clock.advance(0)
    assert scene.new() == [WorkerExited(3, ExitCause.PREEMPTED, -9, "for another job")]
    assert scene.places.given_back == {}


@pytest.mark.parametrize("first_ends", [True, False])
def test_of_two_workers_that_were_found_in_a_place_both_ends_are_told(first_ends):
    """The end of one was not told to the earlier master, and another runs in its place."""
    scene = Scene(at_once=False)
    scene.places.left = (Place("a", "n1", state=READY),)
    over, running = FoundWorker(3, "host", 0, over=True, place="a"), FoundWorker(4, "host", 1, place="a")
    scene.starter.left = (over, running)
    now(scene.launcher.find({}))
    scene.clock.advance(0)
    if first_ends:
        scene.places.change("a", ENDING, "n1")
        scene.starter.report(WorkerExited(3, ExitCause.CRASHED, 1))
        assert scene.new() == [WorkerExited(3, ExitCause.CRASHED, 1)], "it did not end with the place"
        scene.starter.report(WorkerExited(4, ExitCause.KILLED, -15))
    assert scene.new() == []
    scene.places.lose("a", "drained", ExitCause.EVICTED, 143)
    assert [exited.worker_id for exited in scene.new()] == [4] if first_ends else [3, 4]


def test_a_master_that_leaves_ends_nobody_and_what_becomes_of_workers_is_for_the_next_to_tell():
    """Else the master would save it, with replacements that nobody has launched."""
    scene = Scene().placed(1)
    now(scene.launcher.close(keep=True))
    now(scene.launcher.close())
    scene.clock.advance(100)
    assert (scene.starter.started, scene.places.given_back) == ({0: "place-0"}, {})
    scene.launch(1)
    scene.places.lose("place-0", "for another job", ExitCause.PREEMPTED, -9)
    assert scene.new() == []
