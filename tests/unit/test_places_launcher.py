"""Who goes where, and what is told of it: the launcher over any places and any starter, as stories and in any order.

What happens is said as in `PlayedLauncher.happens`; what follows is what is asked of the places (``want 2``, ``give back 0``) and of the starter
(``start 1 in 0``, ``kill 1``), and what is told of workers.
"""

import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.master.core import events
from elasticdl.master.core.events import ExitCause, LauncherFailed, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import Place, PlaceChanged, PlaceEnding, PlaceLost, PlacesRefused, PlaceState
from elasticdl.places.launcher import IDLE_SECONDS, KILL_SECONDS, PlaceLauncher, Seconds
from elasticdl.places.worker_process import judge_exit
from tests.simulation.clock import Clock
from tests.stories import check, parts_of, told_in

READY, WAITING, ENDING = PlaceState.READY, PlaceState.WAITING, PlaceState.ENDING
CAUSES = (ExitCause.PREEMPTED, ExitCause.NODE_LOST, ExitCause.KILLED, ExitCause.CRASHED)
PARTS = r"(?P<id>\S+) (?P<what>[a-z_ ]+?)(?: on (?P<node>\w+))?(?: (?P<code>-?\d+))?(?:: (?P<why>.*))?"


class FakePlaces:
    """Keeps the contract of `Places`; the test says what becomes of them."""

    def __init__(self, asked):
        self.ids, self.asked, self.left = (f"place-{number}" for number in itertools.count()), asked, ()
        self.places, self.given_back = {}, set()  # those that count for `want`, and the ENDING ones; ids of the others

    def reporting_to(self, report):
        self.report = report
        return self

    async def found(self):
        self.places |= {place.id: place for place in self.left}
        return self.left

    def want(self, most, avoid):
        self.asked.append(" not on ".join([f"want {most}", *sorted(avoid)]))
        counted = [place for place in self.places.values() if place.state is not ENDING]
        for place_id in self.waiting()[::-1][: max(0, len(counted) - most)]:
            self.lose(place_id, "nobody wants it any more")
        new = [next(self.ids) for _ in range(most - len(counted))]
        self.places |= {place_id: Place(place_id) for place_id in new}
        for place_id in new:
            self.change(place_id)

    def give_back(self, place_id, *, at_once):
        if place_id in self.places:
            self.asked.append(f"give back {place_id}{' at once' * at_once}")
            self.given_back.add(place_id)
            del self.places[place_id]

    async def close(self, *, keep=False):
        for place_id in [] if keep else [*self.places, *self.given_back]:
            self.lose(place_id)

    def waiting(self):
        return [place.id for place in self.places.values() if place.state is WAITING]

    def change(self, place_id, state=WAITING, node="", reason="", log=""):
        if place_id not in self.given_back:  # of which nothing is told but its end
            place = self.places[place_id] = Place(place_id, node, state=state, reason=reason, log=log)
            self.report(PlaceChanged(place))

    def lose(self, place_id, detail="gone", cause=ExitCause.KILLED, code=-9):
        if self.places.pop(place_id, None) or place_id in self.given_back:
            self.given_back.discard(place_id)
            self.report(PlaceLost(place_id, cause, code, detail))


class FakeStarter:
    """Keeps the contract of `Starter`, and checks what it is asked for."""

    def __init__(self, places):
        self.places, self.started, self.left = places, {}, ()  # ids of places by those of workers

    def reporting_to(self, report):
        self.report = report
        return self

    async def found(self, places, remembered):
        self.started |= {each.worker_id: each.place for each in self.left}
        return self.left

    def start(self, worker_id, place):
        now = self.places.places.get(place.id)
        assert now == place, f"{place} is not there"
        assert now.state is READY, now
        assert place.id not in self.started.values(), f"there is a worker in {place}"
        assert worker_id not in self.started, f"worker {worker_id} is in {self.started[worker_id]}"
        self.started[worker_id] = place.id
        self.places.asked.append(f"start {worker_id} in {place.id}")

    def end(self, worker_id, grace):
        self.places.asked.append(f"{'terminate' if grace is None else 'kill'} {worker_id}")

    def lost(self, place_id):
        self.started = {worker: place for worker, place in self.started.items() if place != place_id}

    async def close(self, *, keep=False):
        for worker_id in [] if keep else list(self.started):
            self.exit(worker_id, -9)

    def exit(self, worker_id, code):
        if self.started.pop(worker_id, None):
            self.report(WorkerExited(worker_id, judge_exit(code)[0], code))


def now(coroutine):
    """The result of one that has nothing to wait for."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


class PlayedLauncher:
    """A launcher over places, a starter and a clock that do what a test says."""

    def __init__(self):
        self.clock, self.reports, self.asked = Clock(), [], []
        self.places = FakePlaces(self.asked)
        self.starter = FakeStarter(self.places)
        ports = self.places.reporting_to, self.starter.reporting_to
        more = {"seconds": Seconds(start=600.0), "call_later": self.call_later}
        self.launcher = PlaceLauncher(*ports, self.take, **more)

    def take(self, report):
        self.reports.append(report)
        self.asked.append(told(report))

    def call_later(self, seconds, function):
        timer = SimpleNamespace(run=function, cancel=lambda: setattr(timer, "run", lambda: None))
        self.clock.after(seconds, lambda: timer.run())
        return timer

    def happens(self, line):
        """``2 run``, ``launch 2 not on n1``, ``after 30``, ``worker 1 exits 3``, ``place 0 waiting on n1: why``."""
        whom, _, rest = line.partition(" ")
        match whom:
            case number if rest == "run":
                for each in range(int(number)):
                    for line in (f"launch {each}", f"place {each} ready on n1", f"worker {each} runs"):
                        self.happens(line)
                self.asked.clear()
            case "launch":
                numbers, *away_from = rest.split(" not on ")
                for number in numbers.split():
                    now(self.launcher.launch(int(number), away_from))
            case "after":
                self.clock.after(float(rest), (over := []).append, True)
                while not over:
                    self.clock.advance()
            case "master":
                now(self.launcher.close(keep=rest == "leaves"))
            case "refused:":
                self.places.report(PlacesRefused(rest))
            case "failed:":
                self.places.report(LauncherFailed(rest))
            case "full":
                self.places.want = lambda most, avoid: None
            case "found":
                self.found(*([each for each in part.split(",") if each.strip()] for part in rest.split("/")))
            case "worker":
                self.worker(**re.fullmatch(PARTS, rest).groupdict(""))
            case "place":
                self.place(**re.fullmatch(PARTS, rest).groupdict(""))
            case _:
                raise ValueError(line)

    def found(self, places, workers, remembered=()):
        """By the next master: ``a ready n1, b lost`` are the places, ``3 a, 4 b over`` who is in them, ``5 a`` who is remembered."""
        for name, state, *node in map(str.split, places):
            self.places.left += (Place(f"place-{name}", *node, state=PlaceState(state)),)
        for number, name, *over in map(str.split, workers):
            host = () if over else ("host", 1000 + int(number))
            self.starter.left += (events.FoundWorker(int(number), *host, over=bool(over), place=f"place-{name}"),)
        before = {int(number): f"place-{name}" for number, name in map(str.split, remembered)}
        for each in now(self.launcher.find(before)):
            over = " over" * each.over
            self.asked.append(f"{each.worker_id}{over} on {each.node} in {each.place}")

    def worker(self, id, what, node, code, why):
        number = int(id)
        if what == "runs":
            self.starter.report(WorkerPlaced(number, "host", 1000 + number))
        elif what == "exits":
            self.starter.exit(number, int(code))
        else:
            getattr(self.launcher, what.replace(" ", "_"))(number)

    def place(self, id, what, node, code, why):
        if what == READY:
            self.places.change(f"place-{id}", READY, node, log=why)
        elif what in list(PlaceState):
            self.places.change(f"place-{id}", PlaceState(what), node, why)
        elif what == "is told to end":
            self.starter.report(PlaceEnding(f"place-{id}"))
        else:
            self.places.lose(f"place-{id}", why, ExitCause(what.removeprefix("is lost as ")), int(code or -9))

    def follows(self):
        """What was asked and told since, in words; of what was wanted the last."""
        new, self.asked[:] = [each.replace("place-", "") for each in self.asked], []
        last = max((number for number, each in enumerate(new) if each.startswith("want ")), default=0)
        return parts_of("; ".join([*(each for each in new[:last] if not each.startswith("want ")), *new[last:]]))


def told(report):
    match report:
        case WorkerPending(number, reason, node):
            return f"{number} waits{' on ' * bool(node)}{node}: {reason}"
        case WorkerPlaced(number, host, pid, node, place):
            assert (host, pid) == ("host", 1000 + number)
            return f"{number} runs{' on ' * bool(node)}{node} in {place}"
        case WorkerExited(number, cause, code, detail, _, node):
            return f"{number} ended{' on ' * bool(node)}{node}: {cause} {code}{': ' * bool(detail)}{detail}"
        case LauncherFailed(reason):
            return f"failed: {reason}"


STORIES = """
a worker waits for a place, is told why once, and of those that wait the one that has waited for it goes first
  launch 0 1 -> want 2
  place 1 waiting on n2: no GPU -> 1 waits on n2: no GPU
  place 1 waiting on n2: no GPU -> nothing
  place 0 waiting: it is pulled; place 1 ready -> 0 waits: it is pulled; start 1 in 1
  worker 1 runs; place 0 ready on n1 -> 1 runs in 1; start 0 in 0
  worker 0 runs -> 0 runs on n1 in 0
a worker is replaced in its own place, where no other is wanted
  1 run; worker 0 exits -9; after 29 -> 0 ended: killed -9
  launch 1; worker 1 kill -> start 1 in 0; kill 1
  worker 1 exits -9; launch 2 -> 1 ended: killed -9; start 2 in 0
  worker 2 runs; after 900 -> 2 runs on n1 in 0
a place is given back when it was idle for a while
  2 run; worker 0 exits 0; worker 1 terminate -> 0 ended: clean 0; terminate 1
  after 29 -> nothing
  after 1 -> give back 0; want 1
  worker 1 exits 3; after 30 -> 1 ended: crashed 3; give back 1; want 0
who waits for a place that is lost has ended, so that whoever launches waits longer, and avoids its node
  launch 0 1; place 1 waiting on n2 -> want 2
  place 1 is lost as evicted: rejected -> 1 ended on n2: evicted -9: rejected; want 1
  place 0 is lost as killed -> want 1
  place 2 ready -> start 0 in 2
a worker stays away from a node, also from an idle place there, if there is any other
  launch 0; place 0 ready on slow -> want 1; start 0 in 0
  launch 1 not on slow -> want 2 not on slow
  worker 0 exits -9 -> 0 ended: killed -9; give back 0; want 1 not on slow
  place 1 ready on slow -> start 1 in 1; want 1
who waits is told why nothing is had of the places that are missing
  full; launch 0 1 -> nothing
  refused: no more for you -> 0 waits: no more for you; 1 waits: no more for you
  launch 2 -> 2 waits: no more for you
  refused: ; launch 3 -> nothing
the end of a worker waits for that of its place, whose cause it has
  1 run; place 0 ending; worker 0 exits 0 -> want 0
  launch 1 -> want 1
  place 0 is lost as preempted 143: for another -> 0 ended: preempted 0: for another; want 1
also where its starter is told first; but a process knows better why it has ended by itself
  1 run; place 0 is told to end -> nothing
  worker 0 exits 0 -> nothing
  place 0 is lost as killed 143: for another -> 0 ended: clean 0; want 0
a place that goes on after all has the next worker
  1 run; place 0 ending; worker 0 exits 3 -> want 0
  launch 1 -> want 1
  place 0 ready -> 0 ended: crashed 3; start 1 in 0; want 1
a worker that can't be killed loses its place
  1 run; worker 0 kill; after 9 -> kill 0
  after 1 -> give back 0 at once; want 0
  place 0 is lost as killed: by force -> 0 ended: killed -9: by force; want 0
and at once where nobody may hear the order any more
  1 run; place 0 ending; worker 0 kill -> want 0; kill 0
  after 0 -> give back 0 at once; want 0
a worker that has not begun does not wait for a node to come back, which may take minutes
  1 run; launch 1; place 1 ready on n1 -> want 2; start 1 in 1
  place 0 ending; place 1 ending: no answer -> want 0
  after 9 -> nothing
  after 1 -> give back 1 at once; want 0
  place 1 is lost as killed: as told -> 1 ended: node_lost -9: no answer; want 0
nor for one that does not start it, each worker from its own beginning
  launch 0; place 0 ready; after 300 -> want 1; start 0 in 0
  worker 0 exits 1; launch 1; after 300 -> 0 ended: crashed 1; start 1 in 0
  launch 2; place 1 ready; after 299 -> want 2; start 2 in 1
  worker 2 runs; after 1 -> 2 runs in 1; give back 0 at once; want 1
  place 0 is lost as killed: as told -> 1 ended: node_lost -9: it was not started within 600 s; want 1
  after 600 -> nothing
of a worker that has crashed it is told where its log is
  launch 0; place 0 ready: cat 0 -> want 1; start 0 in 0
  worker 0 exits 3; launch 1 -> 0 ended: crashed 3: ; its log: cat 0; start 1 in 0
  worker 1 exits -9 -> 1 ended: killed -9
a worker that nobody has launched is killed, and what can't be mended is passed on
  1 run; worker 7 runs -> kill 7
  failed: no image -> failed: no image
another master takes over, and keeps its turn in the queue for those that are launched anew
  found a ready n1, b ending n2, c ready n1, d waiting / 3 a, 4 b -> 3 on n1 in a; 4 on n2 in b
  after 0; launch 5 -> want 3; start 5 in c
  after 30 -> want 2
  place b is lost as evicted 143: drained -> 4 ended: evicted 143: drained; want 2
of a worker whose place was lost in the absence the next master hears why
  found a lost n1, b lost n1 // 3 a, 5 x -> 3 over on n1 in a
  place a is lost as preempted: for another -> 3 ended: preempted -9: for another; want 0
  place b is lost as killed: as told; after 0 -> want 0
of two that are found in a place, one of which has ended there before, both ends are told
  found a ready n1 / 3 a over, 4 a; after 0 -> 3 over on n1 in a; 4 on n1 in a; want 1
  place a ending on n1; worker 3 exits 1 -> want 0; 3 ended: crashed 1
  worker 4 exits -15 -> nothing
  place a is lost as evicted 143: drained -> 4 ended: evicted -15: drained; want 0
a master that leaves ends nobody, and what becomes of workers is for the next to tell
  1 run; master leaves; master closes -> nothing
  after 100; launch 1 -> nothing
  place 0 is lost as preempted: for another -> nothing
"""


@pytest.mark.parametrize("story", list(told_in(STORIES)))
def test_what_follows(story):
    scene = PlayedLauncher()
    for line in story[1:]:
        for each in parts_of(line.partition("->")[0]):
            scene.happens(each)
        check(line, scene.follows())


def may_happen(scene, launched):
    """Each as a line of a story."""
    there, workers = sorted(scene.places.places), scene.starter.started
    yield [f"launch {launched}", f"launch {launched} not on n1"]
    yield [f"after {KILL_SECONDS}", f"after {IDLE_SECONDS}", "after 600"]
    yield [f"worker {number} {end}" for number in range(launched + 1) for end in ("kill", "terminate")]
    yield [f"{place} {state} on {node}" for place in there for state in (READY, ENDING) for node in ("n1", "n2")]
    yield [f"{place} waiting: {why}" for place in scene.places.waiting() for why in ("full", "it is pulled")]
    yield [f"{place} is told to end" for place in sorted(workers.values())]
    yield [f"{place} is lost as {cause}" for place in sorted({*there, *scene.places.given_back}) for cause in CAUSES]
    does = ("runs", "exits 0", "exits 1", "exits -9")
    yield [f"worker {number} {what}" for number in sorted(workers) for what in does]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_happens_in_any_order_every_worker_ends_once_and_no_place_stays(data):
    """The starter's asserts hold as well. What has happened before a failure is a story."""
    scene, launched = PlayedLauncher(), 0
    for _ in range(data.draw(st.integers(0, 40))):
        lines = data.draw(st.sampled_from([each for each in may_happen(scene, launched) if each]))
        line = data.draw(st.sampled_from(lines))
        launched += line.startswith("launch")
        whom, *_ = line.removeprefix("worker ").split()
        scene.happens(line.replace("-", " ", line.startswith("place-")))
        if " is lost " in line and data.draw(st.booleans()):
            scene.places.report(PlaceLost(whom, ExitCause.KILLED, 1, "a second time"))
        if " exits " in line and data.draw(st.booleans()):
            scene.starter.report(WorkerExited(int(whom), ExitCause.CRASHED, 1, "a second time"))
        exits = [report.worker_id for report in scene.reports if isinstance(report, WorkerExited)]
        assert len(exits) == len(set(exits))
        assert len(scene.launcher._workers) == launched - len(exits)
        assert len(scene.places.waiting()) == len(scene.launcher._pending), "each that is pending has one"
    scene.happens("master closes")
    ended = sorted(report.worker_id for report in scene.reports if isinstance(report, WorkerExited))
    assert ended == [*range(launched)]
    scene.happens("after 1000")
    assert (scene.places.places, scene.places.given_back, scene.starter.started) == ({}, set(), {})
