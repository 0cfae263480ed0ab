"""What a storm of real processes is made of: its schedule, what it compares, and what it tells."""

import json

import pytest

from benchmarks.harness import summarise
from benchmarks.storm import training
from benchmarks.storm.driver import Brought
from benchmarks.storm.inside import pauses_by_change
from benchmarks.storm.schedule import Kind, schedule
from benchmarks.storm.training import BATCH, STEPS_PER_EPOCH, Wrong, check_journal, compare, undisturbed
from benchmarks.storm.zoo import watched_softmax
from elasticdl.elastic.core.progress import epoch_order


@pytest.mark.parametrize("count", [1, len(Kind), 100])
def test_a_schedule_has_as_many_disturbances_as_asked_for_and_each_kind_before_any_again(count):
    brought = [each.kind for moment in schedule(3, count) for each in moment.disturbances]
    assert len(brought) == count
    assert len(set(brought)) == min(count, len(Kind))


def test_sometimes_another_one_comes_a_little_later():
    together = [moment.disturbances for moment in schedule(1, 200) if len(moment.disturbances) > 1]
    assert together
    assert all(len({each.kind for each in disturbances}) == 2 for disturbances in together)
    assert all(first.after == 0 < second.after for first, second in together)


@pytest.fixture(scope="module")
def expected():
    return undisturbed(1)


@pytest.fixture
def trained(tmp_path, expected, monkeypatch):
    """What two workers leave that have shared each batch of one epoch."""
    monkeypatch.setattr(training, "undisturbed", lambda epochs: expected)
    losses, record = tmp_path / "losses", tmp_path / "record"
    losses.mkdir()
    record.mkdir()
    order = epoch_order(watched_softmax.SAMPLES, 0, 0).tolist()
    for worker, share in ((0, slice(0, BATCH // 2)), (1, slice(BATCH // 2, BATCH))):
        told, used = [], []
        for step in range(1, STEPS_PER_EPOCH + 1):
            batch = order[(step - 1) * BATCH : step * BATCH]
            used.append(json.dumps({"begin": step, "world": 1, "epoch": 0, "indices": batch[share]}))
            used.append(json.dumps({"commit": step, "world": 1}))
            told.append(f"{step} {expected[step - 1]!r}")
        (losses / str(worker)).write_text("\n".join(told) + "\n")
        (record / f"worker-{worker}.jsonl").write_text("\n".join(used) + "\n")
    return tmp_path


def agreement(folder):
    return compare((folder / "losses").iterdir(), (folder / "record").iterdir(), epochs=1)


def edit(path, line, old, new):
    lines = path.read_text().splitlines()
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_text("\n".join(each for each in lines if each) + "\n")


def test_a_training_that_nothing_has_disturbed_agrees(trained):
    found = agreement(trained)
    assert (found.steps, found.samples) == (STEPS_PER_EPOCH, watched_softmax.SAMPLES)
    assert (found.losses_compared, found.difference) == (2 * STEPS_PER_EPOCH, 0.0)


@pytest.mark.parametrize("wrong", ["1.001", "nan"])
def test_a_loss_that_is_another_is_found(trained, expected, wrong):
    edit(trained / "losses" / "0", 9, repr(expected[9]), repr(expected[9] * float(wrong)))
    with pytest.raises(Wrong, match="the loss of step 10 at worker 0"):
        agreement(trained)


def test_a_step_that_nobody_has_made_is_found(trained, expected):
    for worker in "01":
        edit(trained / "losses" / worker, 9, f"10 {expected[9]!r}", "")
    with pytest.raises(Wrong, match="1 steps were never made, the first is 10"):
        agreement(trained)


def test_a_step_that_a_worker_has_made_twice_is_found(trained, expected):
    edit(trained / "losses" / "1", 9, "10 ", "9 ")
    with pytest.raises(Wrong, match="made step 9 after step 9"):
        agreement(trained)


def test_a_step_too_many_is_found(trained, expected):
    with (trained / "losses" / "1").open("a") as file:
        file.write(f"{STEPS_PER_EPOCH + 1} 0.5\n")
    with pytest.raises(Wrong, match=f"made step {STEPS_PER_EPOCH + 1}"):
        agreement(trained)


def test_a_sample_that_was_never_used_and_one_that_was_used_twice_are_found(trained):
    file = trained / "record" / "worker-0.jsonl"
    first, second = json.loads(file.read_text().splitlines()[0])["indices"][:2]
    edit(file, 0, f"[{first}, {second}, ", f"[{second}, {second}, ")
    with pytest.raises(Wrong, match="epoch 0: 1 samples were never used, and 1 uses were one too many"):
        agreement(trained)


def formed(world, step):
    return {"time": 10.0 * world, "event": "world_formed", "world": world, "step": step}


def test_a_journal_in_which_nothing_was_lost():
    left = {"time": 25.0, "event": "worker_left", "worker": 1, "cause": "killed", "reason": "killed: SIGKILL"}
    check_journal([formed(1, 0), formed(2, 7), left, formed(3, 6), formed(4, 9)])


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"time": 30.0, "event": "worker_left", "worker": 1, "cause": "crashed", "reason": "exit code 1"}, "worker 1 crashed: exit code 1"),
        ({"time": 30.0, "event": "resumed", "path": "checkpoint-10"}, "the state was lost: training went on from checkpoint-10"),
        (formed(3, 5), "world 3 went back to step 5 from step 7"),
    ],
)  # fmt: skip
def test_a_journal_that_shows_a_crash_or_a_loss(entry, complaint):
    with pytest.raises(Wrong, match=complaint):
        check_journal([formed(1, 0), formed(2, 7), entry])


def pause(at, kind, total):
    return {"time": at, "event": "pause", "worker": 1, "world": 2, "kind": kind, "total": total}


def test_pauses_are_told_by_change_and_failures_by_what_was_done():
    brought = [Brought((Kind.KILL,), 10.0, 2.0), Brought((Kind.TERM, Kind.FREEZE), 20.0, 6.0)]
    journal = [pause(11.0, "failure", 1.0), pause(21.0, "shrink", 0.2), pause(25.0, "failure", 3.0)]
    assert pauses_by_change(journal, brought) == {
        "failure": summarise([1.0, 3.0]),
        "failure: KILL": summarise([1.0]),
        "failure: TERM and FREEZE": summarise([3.0]),
        "shrink": summarise([0.2]),
    }
