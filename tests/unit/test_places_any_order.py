"""Whatever happens to places and workers, in any order: what holds of the launcher nevertheless."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from places_scene import ENDING, READY, WAITING, Scene, now

from elasticdl.master.core.events import ExitCause, WorkerExited
from elasticdl.places.base import PlaceEnding, PlaceLost
from elasticdl.places.launcher import IDLE_SECONDS, KILL_SECONDS, Seconds

NODES = st.sampled_from(["n1", "n2"])
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

    @rule(away_from=st.lists(NODES, unique=True))
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
        self.scene.starter.report(PlaceEnding(place_id))

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
        launcher = self.scene.launcher
        assert len(launcher._workers) == self.launched - len(self.exits)
        assert len(self.scene.places.in_state(WAITING)) == len(launcher._pending)

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
