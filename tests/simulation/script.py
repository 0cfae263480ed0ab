"""What a worker's main thread does: the user's script, the elastic loop around it, and the end of the process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core import training_step as agreement
from elasticdl.elastic.core.plan import Progress, StepPlan
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import Disagreement, Position, Vote
from elasticdl.job import messages as m
from elasticdl.master.core.events import ExitCause
from tests.simulation.collectives import FAILED
from tests.simulation.lineage import Model, State, Violation
from tests.simulation.plan import Commits
from tests.simulation.process import DiedError, Process, Steps
from tests.simulation.unlike import Given, disagreement, vote_of

WARM_UP = 0.3
MICRO_BATCH_SECONDS = 0.02
CLOSE_SECONDS = 0.01
BROKEN = "the collective failed"
TORN = Model()  # stands for buffers that a forward pass has changed
SOME_STEPS = 3

# The votes of a step, the model of each member after it, and how its batches differ.
Reduced = tuple[Vote, dict[int, Model], Disagreement]

ONE_STEP = "the members of a world make one step"
EACH_SAMPLE = "each sample of a batch goes to one member"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Rank 0's state."""

    state: State
    progress: Progress


def life(process: Process) -> Steps:
    """From its start to its end."""
    site, tell = process.site, process.tell
    yield from process.sleep(site.startup(process.worker_id))
    if process.to_raise == "exit":
        yield from _exit_early(process)
    order = site.read_data()
    process.is_unlike = order is not site.order
    if order is None:
        yield from _refuse(process, "its data can't be read")
        return
    process.order = order
    process.core.bind(Position(order=process.order, keeper=process))
    yield from process.sleep(WARM_UP)
    if process.order.samples != site.order.samples:  # as the job's rank 0 has told, by way of the master
        yield from _refuse(process, "its data have another number of samples")
    process.core.position.leave()
    tell(p.Trigger.READY)
    while True:
        match (yield from process.next_order()):
            case p.Command.CONNECT:
                yield from _connect(process, process.core.world)
            case p.Command.SYNCHRONIZE:
                yield from _synchronize(process, process.core.world)
            case p.Command.TRAIN:
                yield from _Training(process, process.core.world).run()
            case p.LeaveWorld(_, broken):
                process.left_broken = broken
                process.core.position.undo() if broken else process.core.position.leave()
                process.collectives.break_world(process.core.world.version)
                yield from process.sleep(CLOSE_SECONDS)
                tell(p.Trigger.CLOSED)
            case p.Command.CAST_END_VOTE:
                yield from _cast_end_vote(process)
            case p.Command.COMPLETE:
                yield from _finish(process)
            case p.LeaveJob(_, _, drained):
                process.kept = yield from _hand_over(process, drained=drained)
                if drained:
                    process.checks.leaves(process, left=process.kept)
                else:
                    process.checks.stopped()
                yield from process.close(0)
            case p.Fail(error, message):
                yield from _fail(process, message, users=error is RuntimeError)


def _connect(process: Process, world: World) -> Steps:
    process.advance(Activity.WAIT)
    process.tell(p.Said(m.KvPut(world.version, "simulation", str(world.rank), b"address")))
    found = yield from process.entries(world.version, world.size - 1)
    connected = found and (yield from _operation(process, world, "connect", None, lambda inputs: None)) is not FAILED
    together = yield from _agree(process, connected)
    process.tell(p.Trigger.CONNECTED if together else p.CollectiveFailed(BROKEN))


def _synchronize(process: Process, world: World) -> Steps:
    site, core = process.site, process.core
    if world.is_first and world.rank == 0:
        kept = site.handover.get(process.number)
        whole = yield from _inside(process, kept, _are_of_one_step)
        if kept and whole and kept.progress.step > core.position.progress.step:
            process.state = kept.state.copy()
            core.position.loaded(kept.progress)
        if process.is_unlike:
            yield from _refuse(process, "what was kept is of other data")
    if world.needs_sync and world.size > 1:
        root = world.root.worker_id
        given = Broadcast(process.state.copy(), core.position.progress)
        received = yield from _collective(process, world, "broadcast", given, lambda inputs: inputs[root])
        if received is FAILED:
            process.tell(p.CollectiveFailed(BROKEN))
            return
        if not world.stands_with_root(world.rank):
            process.state = received.state.copy()
        progress = received.progress
    else:
        progress = core.position.progress
    process.require_one_moment(progress.step, f"at the start of world {world.version}")
    process.checks.world_starts(process, world)
    core.synced(progress)
    process.tell(p.Trigger.SYNCED)


def _cast_end_vote(process: Process) -> Steps:
    world = process.core.world
    given = Given(process.state.weights, None, 0, process.core.leaving, compares=world.size > 1)
    reduced = yield from _reduce(process, world, given)
    if reduced is None:
        process.tell(p.CollectiveFailed(BROKEN))
        return
    vote = yield from _sum_inside(process, reduced[0])
    if not vote.one_state:
        process.checks.told_at_end = True  # a warning; to fail now would help nobody
    if process.core.voted(vote, process.site.clock.now) or vote.ended != world.size:
        yield from _disagree(process, "")
    else:
        process.tell(p.Trigger.ALL_RETURNED)


def _finish(process: Process) -> Steps:
    """The training is complete: export the model, say so, and end."""
    site = process.site
    site.after_last_step(process)
    rank, step = process.core.world.rank, process.core.position.progress.step
    yield from process.sleep(site.plan.export if rank == 0 else site.plan.export / 2)
    process.checks.finished(process)
    process.tell(p.Said(m.Finished(step, site.plan.epochs if rank == 0 else 0, {}, together=True)))
    yield from process.close(0)


def _hand_over(process: Process, *, drained: bool) -> Generator[None, Any, bool]:
    """Leave the state for those who come, unless it is certain that others hold it. Whether it has."""
    core, site = process.core, process.site
    alone = core.world.size == 1 or process.left_broken or core.may_be_last
    keeps = drained and (alone or core.world.rank == 0)
    leaves = (yield from _any(process, keeps)) and site.plan.handover and core.position.has_state
    if leaves:
        site.hand_over(process.number, Broadcast(process.state.copy(), core.position.progress))
    return leaves


class _Training:
    """The user's training function in one world."""

    def __init__(self, process: Process, world: World) -> None:
        self._process = process
        self._world = world
        self._commits = process.site.plan.commits

    def run(self) -> Steps:
        """Until it returns, or the core has the main thread do something else."""
        process, core, site = self._process, self._process.core, self._process.site
        while core.position.progress.epoch < site.plan.epochs:
            epoch = core.position.progress.epoch
            for plan in process.order.steps(core.position.progress, self._world.rank, self._world.size):
                yield from self._step(plan)
                if process.orders:
                    return
            core.position.batch = None
            if self._commits is Commits.EACH_STEP_AND_EPOCH and self._commit():
                return
            if core.position.progress.epoch == epoch:  # no commit has ended it
                core.position.progress = core.position.progress.next_epoch()
        process.tell(p.Trigger.RETURNED)

    def _step(self, plan: StepPlan) -> Steps:
        process, state = self._process, self._process.state
        process.core.begin(plan)
        process.has_done("a batch is given")
        process.require_one_moment(plan.step - 1, "when it is given a batch")
        if self._commits is Commits.FIRST and self._commit():
            return
        samples = 0
        for micro_batch in plan.micro_batches:
            process.advance(Activity.COMPUTE)
            yield from process.sleep(MICRO_BATCH_SECONDS)
            samples |= sum(1 << int(number) for number in micro_batch.indices)
        state.buffers = TORN
        self._before_vote(plan, samples)
        if process.to_raise:
            yield from _raise(process)
            return
        process.advance(Activity.WAIT)
        compares = self._looks(plan)
        trained = process.core.position.made > 0
        given = Given(state.weights, plan, samples, process.core.leaving, trained, compares=compares)
        reduced = yield from _reduce(process, self._world, given)
        if reduced is None:
            process.tell(p.CollectiveFailed(BROKEN))
            return
        vote, models, found = reduced
        if process.worker_id in found.refused:
            yield from _refuse(process, found.line)
        if found.refused:
            process.tell(p.CollectiveFailed(found.line))
            return
        vote = yield from _sum_inside(process, vote)
        if not process.core.voted(vote, process.site.clock.now):
            yield from _disagree(process, found.line)
        process.has_done(f"the votes: {vote}")
        model = models[process.worker_id]
        state.weights = state.buffers = model
        process.checks.applied(process, self._world, model)
        if pause := process.core.step_made(0.1, process.site.clock.now):
            process.tell(p.Said(pause))
        process.has_done("the parameters have changed")
        state.values = model
        self._after_vote(plan, samples)
        if not vote.one_state:
            yield from _fail(process, "the workers hold different states")
        if self._commits_after(model.step):
            self._commit()

    def _before_vote(self, plan: StepPlan, samples: int) -> None:
        if samples and self._process.site.plan.in_parts:
            part = (samples & -samples).bit_length() - 1
            self._process.site.parts[part // self._process.order.policy.batch_size(1)] = samples

    def _after_vote(self, plan: StepPlan, samples: int) -> None:
        self._process.state.counted += plan.batch

    def _looks(self, plan: StepPlan) -> bool:
        """Whether weights are compared with this step: the first of its world and epoch."""
        process, place = self._process, (self._world.version, plan.epoch)
        looks = process.compared_in != place and self._world.size > 1
        process.compared_in = place
        return looks

    def _commits_after(self, step: int) -> bool:
        if self._commits is Commits.SOME_STEPS:
            return step % SOME_STEPS == 0
        return self._commits is not Commits.FIRST

    def _commit(self) -> bool:
        """Whether the world is to be left."""
        is_over = self._process.core.commit()
        self._process.has_done("a commit")
        if is_over:
            self._process.tell(p.WorldLeft("the members voted to leave this world"))
        return is_over


def _fail(process: Process, why: str, traceback: str = "", *, users: bool = True) -> Steps:
    process.tell(p.Said(m.Failed(users, why, traceback)))
    yield from process.close(1)


def _disagree(process: Process, difference: str) -> Steps:
    """No step can be made of the members' votes."""
    core = process.core
    yield from _fail(process, difference or core.position.disagreement(core.world.size), users=not difference)


def _refuse(process: Process, why: str) -> Steps:
    """It can't train with the others."""
    process.checks.refused(process)
    yield from _fail(process, f"refused: {why}")


def _exit_early(process: Process) -> Steps:
    """As with sys.exit(0) in the user's code."""
    process.checks.crashed()
    yield from process.close(0)


def _raise(process: Process) -> Steps:
    if process.to_raise == "exit":
        yield from _exit_early(process)
    if process.to_raise == "raise":
        yield from _fail(process, "the user's code raised", "traceback")
    process.end(ExitCause.CRASHED, 1)
    raise DiedError


def _operation(process: Process, world: World, kind: str, given: Any, combine: Any) -> Generator[None, Any, Any]:
    process.collectives.take_part(process.worker_id, process.next_value(), world, kind, given, combine)
    result = yield
    return result


def _collective(process: Process, world: World, kind: str, given: Any, combine: Any) -> Generator[None, Any, Any]:
    """As `elasticdl.elastic.collectives.torch_inside`: it succeeds in all processes of a worker, or in none."""
    result = yield from _operation(process, world, kind, given, combine)
    together = yield from _agree(process, result is not FAILED)
    return result if together else FAILED


def _inside(process: Process, given: Any, combine: Callable[[Sequence[Any]], Any]) -> Generator[None, Any, Any]:
    if process.group is None:
        return given
    process.group.agree(process, given, combine)
    result = yield
    return result


def _agree(process: Process, succeeded: bool) -> Generator[None, Any, bool]:
    """Whether it has in all processes of the worker."""
    found: bool = yield from _inside(process, succeeded, all)
    return found


def _any(process: Process, mine: bool) -> Generator[None, Any, bool]:
    """Whether one of the processes of the worker says so."""
    found: bool = yield from _inside(process, mine, any)
    return found


def _are_of_one_step(kept: Sequence[Broadcast | None]) -> bool:
    return len({each and each.progress.step for each in kept}) == 1


def _sum_inside(process: Process, vote: Vote) -> Generator[None, Any, Vote]:
    """Of the votes that each process has summed with its equals."""

    def combine(votes: Sequence[Vote]) -> Vote:
        leaving, one_state = any(each.leaving for each in votes), all(each.one_state for each in votes)
        return replace(vote, leaving=leaving, one_state=one_state)

    found: Vote = yield from _inside(process, vote, combine)
    return found


def _reduce(process: Process, world: World, given: Given) -> Generator[None, Any, Reduced | None]:
    def combine(inputs: dict[int, Given]) -> Reduced:
        return combine_step(process, world, inputs)

    result = yield from _collective(process, world, "step", given, combine)
    return None if result is FAILED else result


def combine_step(process: Process, world: World, inputs: dict[int, Given]) -> Reduced:
    """All members' gradients have arrived: what they add up to is what the model becomes."""
    inputs = dict(sorted(inputs.items(), key=lambda item: item[0] != world.root.worker_id))
    members, checks = list(inputs.values()), process.checks
    first, vote = members[0], vote_of(members)
    if not vote.one_batch and not vote.ended:
        found = disagreement(inputs)
        plans = {worker_id: each.plan and each.plan.checksum for worker_id, each in inputs.items()}
        differing = {worker_id for worker_id, plan in plans.items() if plan != plans[world.root.worker_id]}
        checks.judged(differing, inputs, found)
        return vote, {}, found
    epoch = first.plan.epoch if first.plan else first.weights.epoch
    differing = {worker_id for worker_id, each in inputs.items() if each.weights is not first.weights}
    if differing:
        compared = not vote.one_state
        refused = agreement.newcomers_alone([(each, inputs[each].trained) for each in inputs], differing)
        if compared and not vote.ended:
            found = Disagreement("other weights", refused)
            checks.judged(differing, inputs, found)
            if refused:
                return vote, {}, found
        checks.differ(world, epoch, compared=compared)
    if vote.ended or first.plan is None:
        return vote, {worker_id: each.weights for worker_id, each in inputs.items()}, Disagreement()
    steps = {(each.plan.epoch, each.plan.step) for each in members if each.plan}
    if len(steps) > 1:
        raise Violation(ONE_STEP, f"world {world.version}: {sorted(steps)}")
    batch = reduce(or_, (each.samples for each in members))
    if batch.bit_count() != vote.samples:
        text = f"world {world.version}, step {first.plan.step}: {vote.samples} are {batch.bit_count()}"
        raise Violation(EACH_SAMPLE, text)
    checks.reduced(process, world, first.weights, first.plan, batch)
    models = {worker_id: each.weights.after(epoch, batch, world.version) for worker_id, each in inputs.items()}
    return vote, models, Disagreement()
