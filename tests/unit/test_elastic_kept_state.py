"""What a stopped training is kept as, what its last worker leaves behind, and which other training goes on from it."""

from dataclasses import replace

import pytest
from elastic_kit import Board, Trainee
from refusal_kit import refused
from session_kit import FakeMaster

from elasticdl.elastic.collectives.port import Inside
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy, Progress
from elasticdl.elastic.core.protocol import Member, Stopped, World
from elasticdl.elastic.training.kept_state import KeptState
from elasticdl.job import messages as m
from elasticdl.job.spec import JobSpec

POLICY = BatchPolicy(20, None, 10)
WORLD = World.of(1, (Member(3, "h", 0, False),), 0)
STOPPED = p.Ordered(m.StopWork("elasticdl stop", checkpoint=True))
UNKEPT = p.Ordered(m.StopWork("elasticdl stop", checkpoint=False))
STOP = Stopped("elasticdl stop", checkpoint=True)
LEAVES = p.Terminated("told to leave")
MASTER_LOST = p.MasterLost("no master for 30 s")


class OnlyWorker:
    """A worker of a job, the only one, whose kept state is in this folder or URL."""

    def __init__(self, place, *, resume=True, **values):
        self.master = FakeMaster(WORLD)
        self.member = Trainee(0, Board(1), POLICY, joins=False, session=self.master.session)
        self.context, self.state = self.member.context, self.member.state
        self.context.kept = KeptState(str(place), resume=resume)
        self.state.values.update(values)

    def train(self, *, stop_after=None, order=STOPPED):
        def train():
            for batch in self.member.steps():
                if batch.plan.step == stop_after:
                    self.context.session.post(order)
                self.member.make_step(batch)
                self.member.losses.append(self.state.loss)
                self.state.commit()

        if stop_after is None:
            self.context.run(train, self.state)
            self.context.finish(step=self.state.step, epochs=1, metrics={})
        else:
            with pytest.raises(Stopped):
                self.context.run(train, self.state)
        return self

    def leave(self, stopped):
        with pytest.raises(Stopped), self.context._handing_over(self.state):
            raise stopped

    def told(self, event="warning"):
        return self.master.notices(event)


def names(tmp_path):
    folder = tmp_path / "kept"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize(("order", "kind"), [(STOPPED, "{}"), (LEAVES, "file://{}"), (MASTER_LOST, "{}")])
def test_the_next_goes_on_from_there_and_at_its_end_nothing_is_left(tmp_path, order, kind):
    """Another job, or a worker of this one whose last has left, or has found no master any more."""
    place = kind.format(tmp_path / "kept")
    first = OnlyWorker(place, seen=1)
    first.context.session.post(p.Welcomed(0.5))
    first.train(stop_after=2, order=order)
    assert names(tmp_path) == ["stopped-0000000002.state"]
    (told,) = first.told("checkpoint")
    assert (told["step"], told["path"]) == (2, f"{place}/stopped-0000000002.state")
    second, undisturbed = OnlyWorker(place, seen=0).train(), OnlyWorker(tmp_path / "none").train()
    (resumed,) = second.told("resumed")
    assert (resumed["step"], resumed["path"]) == (2, told["path"])
    assert (second.state.step, second.state.seen) == (undisturbed.state.step, 1)
    assert second.member.losses == undisturbed.member.losses[2:]
    assert names(tmp_path) == []


def test_who_wants_nothing_kept_and_who_has_not_made_a_step_keeps_nothing(tmp_path):
    OnlyWorker(tmp_path / "kept").train(stop_after=1, order=UNKEPT)
    untrained = OnlyWorker(tmp_path / "kept")
    untrained.state._position.has_state = True
    untrained.leave(STOP)
    unkept = OnlyWorker(tmp_path / "kept")
    unkept.state.cannot_be_kept = "it is in its second fit()"
    unkept.train(stop_after=1)
    assert unkept.told() == [{"message": "nothing is kept of step 1: it is in its second fit()"}]
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["{}", "file://{}"])
def test_a_later_stop_takes_the_place_of_an_earlier_and_one_that_began_anew_of_all(tmp_path, kind):
    place = kind.format(tmp_path / "kept")
    for step in (1, 3):
        OnlyWorker(place).train(stop_after=step)
    assert names(tmp_path) == ["stopped-0000000003.state"]
    anew = OnlyWorker(place, resume=False).train(stop_after=1)
    assert names(tmp_path) == ["stopped-0000000001.state"]
    assert not anew.told("resumed")


def test_of_a_world_that_broke_the_state_that_is_a_step_further_stays(tmp_path):
    place = tmp_path / "kept"
    for steps in (3, 2):
        KeptState(str(place)).write(OnlyWorker(tmp_path / "none").train(stop_after=steps, order=UNKEPT).state)
    assert names(tmp_path) == ["stopped-0000000002.state", "stopped-0000000003.state"]
    later = OnlyWorker(place)
    resume(later)
    assert later.state.step == 3


def test_what_can_not_be_kept_is_told_and_what_was_there_stays(tmp_path):
    kept = tmp_path / "kept"
    OnlyWorker(kept).train(stop_after=1)
    before = (kept / "stopped-0000000001.state").read_bytes()
    job = OnlyWorker(kept)
    job.state.values["rule"] = lambda step: step  # no pickle can hold it
    job.train(stop_after=2)
    (failed,) = job.told("checkpoint_failed")
    assert (failed["step"], "--checkpoint_dir names another place" in failed["reason"]) == (2, True)
    assert names(tmp_path) == ["stopped-0000000001.state"]
    assert (kept / "stopped-0000000001.state").read_bytes() == before


def test_in_a_pod_nothing_is_kept_without_a_folder_that_all_see(tmp_path):
    """Its folder is there, but the next pod's is another one."""
    for options, left in (({}, []), ({"checkpoint_dir": str(tmp_path / "kept")}, ["stopped-0000000002.state"])):
        job = OnlyWorker("")
        job.context.kept = KeptState.of(JobSpec(image="i", job_name="j", **options), tmp_path)
        job.train(stop_after=2)
        failed = [each["reason"] for each in job.told("checkpoint_failed")]
        assert failed == ([] if left else ["pods share no folder; --checkpoint_dir names another place"])
        assert names(tmp_path) == left


def resume(job):
    job.context.take_over(job.state)


def test_another_training_is_told_so_in_one_line_and_so_is_half_a_file(tmp_path):
    kept = tmp_path / "kept"
    OnlyWorker(kept).train(stop_after=1)
    job, path = OnlyWorker(kept), kept / "stopped-0000000001.state"
    job.state.sampler.order = replace(job.state.sampler.order, samples=60)
    why = "stands within an epoch of other data: samples was 50 and is 60"
    refused(rf"^{path}, kept of step 1, {why}; give --no_resume to begin anew$", lambda: resume(job))
    for damaged in (path.read_bytes()[:1000], b"", b"nothing of the kind"):
        path.write_bytes(damaged)
        refused(rf"^{path} can't be read: .*; give --no_resume to begin anew$", lambda: resume(OnlyWorker(kept)))
        assert path.read_bytes() == damaged


@pytest.mark.parametrize(("own", "taken"), [(1, True), (2, False), (3, False)])
def test_of_a_checkpoint_of_the_scripts_own_and_a_kept_state_the_later_is_taken(tmp_path, own, taken):
    kept = tmp_path / "kept"
    OnlyWorker(kept).train(stop_after=2)
    job = OnlyWorker(kept)
    job.context.loaded(Progress(0, 20, own, 20))
    resume(job)
    assert job.state.step == (2 if taken else own)
    told = [f"the script goes on from step {own} by a checkpoint of its own" in each["message"] for each in job.told()]
    assert told == ([] if taken else [True])
    assert bool(job.told("resumed")) is taken


# -- what the last worker leaves to the next, of the same job --


@pytest.mark.parametrize(("last", "left"), [(False, []), (True, ["stopped-0000000002.state"])])
def test_of_several_only_the_last_leaves_it_or_rank_0(tmp_path, last, left):
    job = OnlyWorker(tmp_path).train(stop_after=2, order=LEAVES)
    job.context.kept.remove()
    of_two = World.of(1, (Member(1, "h", 2, True), Member(3, "h", 2, True)), 1)
    job.context.collective.world, job.context.session.core.may_be_last = of_two, last
    job.leave(Stopped("told", checkpoint=False, drained=True))
    assert [path.name for path in tmp_path.glob("*")] == left


def test_a_job_that_is_to_begin_anew_goes_on_from_what_its_own_workers_have_kept(tmp_path):
    """And from nothing that an earlier job has left in the same place."""
    place, own = tmp_path / "checkpoints", tmp_path / "job"
    own.mkdir()
    OnlyWorker(place).train(stop_after=3)
    spec = JobSpec(command=["s.py"], checkpoint_dir=str(place), resume=False)
    first, second = OnlyWorker(place), OnlyWorker(place)
    for job in (first, second):
        job.context.kept = KeptState.of(spec, own)
    assert first.context.kept.read(first.state, pytest.fail) == ""
    first.train(stop_after=1)
    assert first.context.kept.read(second.state, pytest.fail).startswith(str(own))
    assert second.state.step == first.state.step == 1
    assert KeptState(str(place)).read(OnlyWorker(place).state, pytest.fail), "a job that goes on finds it as well"
    second.train()
    assert [*own.iterdir(), *place.iterdir()] == [], "the training is complete"


# -- of a worker of several processes --


class OneOfTwo(Inside):
    """What the other process of the worker gives to a sum of so many; to others, and if None, the same as this one."""

    size = 2

    def __init__(self, rank, others=None):
        self.rank, self.others = rank, others

    def sum(self, numbers):
        others = self.others if self.others and len(self.others) == len(numbers) else numbers
        return [mine + its for mine, its in zip(numbers, others, strict=True)]


@pytest.fixture
def kept_by_two(tmp_path):
    """Both have kept step 2 in this folder."""
    job = OnlyWorker(tmp_path / "none").train(stop_after=2, order=UNKEPT)
    for rank in range(2):
        KeptState(str(tmp_path / "kept"), inside=OneOfTwo(rank)).write(job.state)
    assert names(tmp_path) == ["stopped.0of2-0000000002.state", "stopped.1of2-0000000002.state"]
    return str(tmp_path / "kept")


def test_each_process_goes_on_from_what_it_has_kept_itself_and_takes_only_that_away(tmp_path, kept_by_two):
    job, kept = OnlyWorker(tmp_path / "none"), KeptState(kept_by_two, inside=OneOfTwo(1))
    assert kept.read(job.state, pytest.fail) == f"{kept_by_two}/stopped.1of2-0000000002.state"
    assert job.state.step == 2
    job.train(stop_after=3, order=UNKEPT)
    kept.write(job.state)
    assert names(tmp_path) == ["stopped.0of2-0000000002.state", "stopped.1of2-0000000003.state"]
    kept.remove()
    assert names(tmp_path) == ["stopped.0of2-0000000002.state"]
    OnlyWorker(kept_by_two, resume=False).train(stop_after=1)
    assert names(tmp_path) == ["stopped-0000000001.state"], "of others nothing stays"


@pytest.mark.parametrize(
    ("rank", "size", "others"),
    [
        (0, 2, (3.0, 9.0, 0.0)),  # of the other process another step is the newest
        (0, 2, (0.0, 0.0, 1.0)),  # and of it nothing is there
        (2, 3, None),
        (0, 1, (0.0, 0.0, 0.0)),
    ],
)
def test_what_is_not_kept_of_all_processes_or_of_others_is_refused(tmp_path, kept_by_two, rank, size, others):
    inside = OneOfTwo(rank, others)
    inside.size = size
    kept, job = KeptState(kept_by_two, inside=inside), OnlyWorker(tmp_path / "none")
    why = f"^what is kept in {kept_by_two} is not of workers of {size} processes, or is not whole: .*; give --no_resume"
    refused(why, lambda: kept.read(job.state, pytest.fail))
    assert job.state.step == 0
