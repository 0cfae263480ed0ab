"""What has to hold at each moment of a history; each promise is a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticdl.elastic.core.plan import StepPlan
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.core.training_step import Disagreement, WorkerState
from elasticdl.job import messages as m
from elasticdl.master.core import values
from elasticdl.master.core.fleet import BURST, LEAST_BURST, LEAST_RATE
from elasticdl.master.core.values import CRASHES_AT_START, Phase
from tests.simulation.adapter import HEARTBEAT_TIMEOUT, LINGER_SECONDS
from tests.simulation.lineage import Model, Violation
from tests.simulation.plan import Kind
from tests.simulation.trace import Silent
from tests.simulation.unlike import Given

if TYPE_CHECKING:
    from tests.simulation.masters import Master
    from tests.simulation.process import Process
    from tests.simulation.site import Site

ONCE = "every sample is trained on once in each epoch"
NEXT_STEP = "no step is applied twice or left out"
ONE_LINEAGE = "never do two worlds train at once"
ONE_WORLD = "no version of the world is published twice with different members"
NEWEST_FIRST = "rank 0 holds the newest state of a world's members"
KEPT = "the state is lost only with the last worker that holds it"
HELD = "who alone holds the state stays until another has it, or its time is over"
PARTS = "after a pass in parts each part is there whole, and each sample was counted once"
COMPLETE = "a job succeeds only with a model that all epochs have made"
ONE_RESULT = "workers of a world that finish hold one model"
NOTHING_LEFT = "when a job has ended, nothing of it runs"
LEAVES = "who is told to leave does so after a step"
DONE_ONCE = "a training that is complete is not done again"
SPARED = "no worker is killed that nothing has befallen"
LET_IN = "a worker that is ready is let in when there is room"
JUSTIFIED = "a job ends as it was told to, or fails for a reason"
ONE_MODEL = "the members of a world hold one model"
ALIKE = "who trains has the job's data, and nobody else is refused"
BOUNDED = "workers are launched at a bounded rate, whatever becomes of them"
NO_START = "workers in a row could not start"

# More than the linger time and three steps with one worker.
SECONDS_TO_LEAVE = 2.6
STEPS_TO_LEAVE = 8
STEPS_TO_BE_KNOWN = 25  # longer than a heartbeat
# For what a fault has left to be mended, and for a worker to be let in then.
RECOVERY_SECONDS = 5.0
LAUNCHES_SECONDS = 10.0
WAITING_SECONDS = 1.5


def _hears(process: Process, master: Master) -> bool:
    stream = process.to_master.stream
    return stream is not None and stream.master is master and not stream.broken


@dataclass(frozen=True, slots=True)
class _Published:
    number: int  # in the order of publication
    members: tuple[Member, ...]
    processes: list[Process]  # of the members
    head: Model  # the newest that all members of a world had held
    holders: set[Process]  # of that model; the master could hear them, or should have waited for them


class Checks:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._worlds: dict[int, _Published] = {}  # the latest of each version
        self._publications = 0
        self._applied: dict[int, dict[Model, set[int]]] = {}  # by world and model: members that hold it
        self._head = site.origin  # the newest that all members of a world have held
        self._trained = 0  # number of the latest published world that has made a step
        self._results: dict[int, Model] = {}  # of those who have finished, by publication of their world
        self._accepted: set[Phase] = {Phase.SUCCEEDED}
        self._crashes = self._stopped = 0
        self._acknowledged: Process | None = None  # has finished, and the master has taken it
        # Has trained, and the master has heard that no other worker would do better.
        self._blamed: Process | None = None
        self.master_disturbed = self.saves_lost = self.master_cut_off = False
        self.told_at_end = False  # that weights differ
        self._holder_died = -math.inf  # when one did that held the newest state
        self._launches: dict[int, list[float]] = {}  # by master, as each begins to count anew
        self._refused = 0  # workers that are unlike the others
        self._drifted: tuple[int, int] | None = None  # world and epoch in which weights have become others

    # ---- worlds ----

    def published(self, master: Master, world: values.World) -> None:
        known = self._worlds.get(world.version)
        alive = [process for process in known.processes if process.alive and not process.doomed] if known else []
        if known and known.members != world.members and alive and not self.saves_lost:
            ids = [[member.worker_id for member in members] for members in (known.members, world.members)]
            raise Violation(ONE_WORLD, f"world {world.version} is {ids[0]} and {ids[1]}")
        if known is None or known.members != world.members or (self.saves_lost and not alive):
            self._note_world(master, world)
        holding = [member.step for member in world.members if member.has_state]
        root = world.members[0]
        if holding and not (root.has_state and root.step == max(holding)):
            raise Violation(NEWEST_FIRST, f"world {world.version}: {world.members}")

    def _note_world(self, master: Master, world: values.World) -> None:
        if self._acknowledged and not self.saves_lost and not any(member.has_state for member in world.members):
            text = f"worker {self._acknowledged.worker_id} had finished, and world {world.version} begins anew"
            raise Violation(DONE_ONCE, text)
        self._publications += 1
        processes = self._site.cluster.processes
        ids = set(world.worker_ids)
        begins_anew = not any(member.has_state for member in world.members)
        holders = {
            process
            for process in processes
            if process.state.weights.comes_from(self._head)
            and process.core.position.has_state
            and (_hears(process, master) or (begins_anew and self._may_be_back(process, master)))
            and not (process.doomed or process.frozen or process.session.closing)
        }
        members = [process for process in processes if process.worker_id in ids]
        self._worlds[world.version] = _Published(self._publications, world.members, members, self._head, holders)

    def _may_be_back(self, process: Process, master: Master) -> bool:
        """It is cut off from the master, and has not been for so long that it would be given up."""
        session = process.to_master
        cut = session.cut_from.get(master.generation)
        lost = session.stream is None or session.stream.broken
        return process.alive and lost and cut is not None and self._site.clock.now - cut < HEARTBEAT_TIMEOUT

    def world_starts(self, process: Process, world: World) -> None:
        """Rank 0 knows with what state."""
        if world.rank:
            return
        published, model = self._worlds[world.version], process.state.weights
        if model.comes_from(published.head) or self.saves_lost:
            return
        holders = sorted(each.worker_id for each in published.holders if each.alive and not each.doomed)
        if holders:
            text = f"world {world.version} begins after {model}, and workers {holders} held {published.head}"
            raise Violation(KEPT, text)

    # ---- steps ----

    def reduced(self, process: Process, world: World, model: Model, plan: StepPlan, batch: int) -> None:
        """All gradients of a step on these samples have come together."""
        site = self._site
        if plan.step != model.step + 1:
            raise Violation(NEXT_STEP, f"step {plan.step} follows {model}")
        if plan.epoch == model.epoch:
            if again := model.seen & batch:
                raise Violation(ONCE, f"step {plan.step} has {again.bit_count()} samples again, after {model}")
        elif plan.epoch != model.epoch + 1 or site.missing(model):
            text = f"step {plan.step} of epoch {plan.epoch} follows {model}: {site.missing(model)} are missing"
            raise Violation(ONCE, text)
        published = self._worlds[world.version]
        if published.number < self._trained:  # only while those in it are being ended
            alive = [each.worker_id for each in published.processes if each.alive and not each.doomed]
            if alive:
                raise Violation(ONE_LINEAGE, f"world {world.version} with {alive} trains on beside a later one")
        self._trained = max(self._trained, published.number)

    def applied(self, process: Process, world: World, model: Model) -> None:
        holders = self._applied.setdefault(world.version, {}).setdefault(model, set())
        holders.add(process.worker_id)
        if len(holders) == world.size:
            del self._applied[world.version][model]
            if self._worlds[world.version].number >= self._trained:
                self._head = model

        self._refuse_to_stay(process)
        if process.worker_id == world.root.worker_id and world.size < self._site.most:
            self._refuse_to_keep_out(world)

    def _refuse_to_keep_out(self, world: World) -> None:
        now = self._site.clock.now
        if now < self._site.quiet_from + RECOVERY_SECONDS:
            return
        for each in self._site.cluster.processes:
            waits = each.core.state is WorkerState.WAITING and each.told_at is None
            if waits and now - each.asked_at > WAITING_SECONDS:
                text = f"worker {each.worker_id} waits since {each.asked_at:.1f} s, world {world.version} trains on"
                raise Violation(LET_IN, text)

    def _refuse_to_stay(self, process: Process) -> None:
        if process.told_at is None:
            return
        process.steps_since_told += 1
        seconds = self._site.clock.now - process.told_at - process.held_up
        if process.steps_since_told > STEPS_TO_LEAVE and seconds > SECONDS_TO_LEAVE:
            raise Violation(LEAVES, f"worker {process.worker_id} was told {seconds:.1f} s ago, and trains on")

    def dies(self, process: Process) -> None:
        """Not by itself."""
        if process.state.weights.comes_from(self._head):
            self._holder_died = self._site.clock.now

    def leaves(self, process: Process, *, left: bool) -> None:
        """It was told to, and ends now. ``left``: it has left the state for those who come."""
        now, model = self._site.clock.now, process.state.weights
        if process.told_at is None or left or self._results or not process.held_when_told:
            return
        if not model.comes_from(self._head):
            return
        others = [each for each in self._site.cluster.processes if each is not process and not each.doomed]
        # Of the world that this one leaves: a collective may have failed for the other one alone, which then goes on from its last commit.
        world = process.core.world.version
        held = any(
            each.state.weights.comes_from(self._head)
            or (each.core.position.has_state and each.core.world.version == world)
            for each in others
            if not each.session.closing
        )
        known = self._holder_died < process.told_at - HEARTBEAT_TIMEOUT  # the master may have counted on another before
        if not held and known and now - process.told_at < LINGER_SECONDS:
            text = f"worker {process.worker_id} was told {now - process.told_at:.2f} s ago, and leaves with {model}"
            raise Violation(HELD, text)

    def killed(self, process: Process) -> None:
        """A master has given it up."""
        if Phase.STOPPED in self._accepted:
            return
        excused = process.disturbed or self.master_disturbed or process.told_at is not None
        if not excused and not process.is_preparing:
            raise Violation(SPARED, f"worker {process.worker_id}, {process.core.state}")

    def launched(self, master: Master) -> None:
        """A master asks for one more worker."""
        site, times = self._site, self._launches.setdefault(master.generation, [])
        times.append(site.clock.now)
        scaled = sum(fault.kind is Kind.SCALE for fault in site.plan.faults)
        policy = 1000 if site.plan.policy else 0  # who chooses another number each half second asks as often
        most = (1 + scaled + BURST) * site.plan.workers + LEAST_BURST + LEAST_RATE * LAUNCHES_SECONDS + policy
        lately = sum(time > site.clock.now - LAUNCHES_SECONDS for time in times)
        if lately > most:
            text = f"master {master.generation} launches {lately} in {LAUNCHES_SECONDS:.0f} s, of {site.plan.workers}"
            raise Violation(BOUNDED, text)

    # ---- workers that are unlike ----

    @property
    def has_trained(self) -> bool:
        """And a master has heard of it."""
        return self._head.step >= STEPS_TO_BE_KNOWN

    def refused(self, process: Process) -> None:
        """It can't begin to train, for what it has read."""
        drifted = self._drifted is not None and self._drifted[0] == process.core.world.version
        if not process.is_unlike and not drifted:
            raise Violation(ALIKE, f"worker {process.worker_id} is refused, and has what the job has")
        self._refused += 1

    def judged(self, differing: set[int], members: dict[int, Given], found: Disagreement) -> None:
        """These differ from rank 0's worker, which is the first. Newcomers that alone differ are refused, and nobody else is."""
        first, *_ = members.values()
        newcomers_alone = first.trained and not any(members[worker_id].trained for worker_id in differing)
        if set(found.refused) != (differing if newcomers_alone else set()):
            why = "are newcomers" if newcomers_alone else "are not the only newcomers, or have trained"
            text = f"workers {differing} {why}, and {found.refused or 'none of them'} are refused alone"
            raise Violation(ALIKE, text)

    def drifts(self, process: Process, model: Model) -> None:
        state = process.state
        state.weights = state.buffers = state.values = model
        process.saved = state.copy()
        self._drifted = (process.core.world.version, model.epoch)

    def differ(self, world: World, epoch: int, *, compared: bool) -> None:
        """The members of a world make a step with different weights. They have looked, or they have looked in this world and epoch
        before it came to this."""
        if self._drifted is None or (not compared and self._drifted != (world.version, epoch)):
            raise Violation(ONE_MODEL, f"world {world.version}, epoch {epoch}: weights differ, and nobody has looked")
        if compared:
            self.accept(Phase.FAILED)

    # ---- the end ----

    def acknowledged(self, process: Process) -> None:
        """The master has taken its last word."""
        if isinstance(process.last_word, m.Finished):
            self._acknowledged = process
        elif isinstance(process.last_word, m.Failed) and process.last_word.users and process.core.position.made:
            self._blamed = process

    def accept(self, phase: Phase) -> None:
        """The job may end so."""
        self._accepted.add(phase)

    def crashed(self) -> None:
        """A worker did, and is to blame."""
        self._crashes += 1
        if self._crashes >= CRASHES_AT_START:
            self._accepted.add(Phase.FAILED)

    def stopped(self) -> None:
        """A worker obeys the order to stop. To a master that knows of none any more, as saves are lost, it has crashed."""
        self._stopped += 1

    def finished(self, process: Process) -> None:
        model, site = process.state.weights, self._site
        if model.epoch != site.plan.epochs - 1 or site.missing(model):
            text = f"worker {process.worker_id} has finished with {model}: {site.missing(model)} samples are missing"
            raise Violation(COMPLETE, text)
        if site.plan.in_parts:
            self._require_parts(process)
        published = self._worlds[process.core.world.version]  # if saves are lost, a version may be used again
        result = self._results.setdefault(published.number, model) if process in published.processes else model
        if model is not result and not self.told_at_end:
            raise Violation(ONE_RESULT, f"worker {process.worker_id} has {model}, another {result}")

    def _require_parts(self, process: Process) -> None:
        size, samples = self._site.order.policy.batch_size(1), self._site.plan.samples
        expected = {at // size: (1 << min(at + size, samples)) - (1 << at) for at in range(0, samples, size)}
        ended = f"worker {process.worker_id} has finished"
        if wrong := [number for number, part in expected.items() if self._site.parts.get(number) != part]:
            raise Violation(PARTS, f"{ended}, and parts {wrong} are not what they should be")
        if process.state.counted != samples:
            raise Violation(PARTS, f"{ended}, and has counted {process.state.counted} of {samples} samples")

    def ended(self, phase: Phase, reason: str) -> None:
        if self.saves_lost and self._crashes + self._stopped >= CRASHES_AT_START:
            self.accept(Phase.FAILED)
        if self._refused and (
            NO_START in reason or self.saves_lost or self.master_cut_off
        ):  # too few others, or not known
            self.accept(Phase.FAILED)
        if phase not in self._accepted:
            raise Violation(JUSTIFIED, f"the job has {phase}: {reason}")
        if phase is Phase.SUCCEEDED and self._blamed and not (self.saves_lost or self.master_cut_off):
            text = f"the job has {phase}, and worker {self._blamed.worker_id} had told why it fails"
            raise Violation(JUSTIFIED, text)
        if phase is Phase.SUCCEEDED and not self._results:
            raise Violation(COMPLETE, "nobody has finished")
        running = [process.worker_id for process in self._site.cluster.processes if not process.doomed]
        if running:
            raise Violation(NOTHING_LEFT, f"the job has {phase}, and workers {running} run")


class Unchecked(Silent):
    """In the place of `Checks` for the other processes of a worker: what the checks know of a worker they know of process 0. But
    each ends with the model that all epochs have made."""

    told_at_end = False

    def __init__(self, site: Site) -> None:
        self.finished = site.checks.finished
