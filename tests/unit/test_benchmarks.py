"""What a storm finds in what it has seen: lost steps, and a training that it has changed."""

import json

import pytest

from benchmarks.storm import training
from benchmarks.storm.driver import Kind, schedule
from benchmarks.storm.training import BATCH, STEPS_PER_EPOCH, Wrong, check_journal, compare, undisturbed
from benchmarks.storm.zoo import watched_softmax
from elasticdl.elastic.core.plan import epoch_order


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


def scale_loss(lines, factor):
    step, loss = lines[9].split()
    lines[9] = f"{step} {float(loss) * factor!r}"


def use_second_sample_twice(lines):
    begun = json.loads(lines[0])
    begun["indices"][0] = begun["indices"][1]
    lines[0] = json.dumps(begun)


@pytest.mark.parametrize(
    ("files", "damage", "said"),
    [
        ("losses/0", lambda lines: scale_loss(lines, 1.001), "the loss of step 10 at worker 0"),
        ("losses/0", lambda lines: scale_loss(lines, float("nan")), "the loss of step 10 at worker 0"),
        ("losses/*", lambda lines: lines.pop(9), "1 steps were never made, the first is 10"),
        ("losses/1", lambda lines: lines.insert(9, lines[8]), "made step 9 after step 9"),
        ("losses/1", lambda lines: lines.append("201 0.5"), "made step 201, and there are 200"),
        ("record/worker-0.jsonl", use_second_sample_twice, "epoch 0: 1 samples were never used, and 1 uses were"),
    ],
)
def test_what_is_lost_repeated_or_different_is_found(trained, files, damage, said):
    found = agreement(trained)
    assert (found.steps, found.samples) == (STEPS_PER_EPOCH, watched_softmax.SAMPLES)
    assert (found.losses_compared, found.largest_difference) == (2 * STEPS_PER_EPOCH, 0.0)
    for path in trained.glob(files):
        lines = path.read_text().splitlines()
        damage(lines)
        path.write_text("\n".join(lines) + "\n")
    with pytest.raises(Wrong, match=said):
        agreement(trained)


def test_a_journal_that_shows_a_crash_or_a_loss():
    def formed(world, step):
        return {"event": "world_formed", "world": world, "step": step}

    def left(cause, reason):
        return {"event": "worker_left", "worker": 1, "cause": cause, "reason": reason}

    sound = [formed(1, 0), formed(2, 7), left("killed", "killed: SIGKILL")]
    check_journal([*sound, formed(3, 6), formed(4, 9)])
    for entry, complaint in (
        (left("crashed", "exit code 1"), "worker 1 crashed: exit code 1"),
        ({"event": "resumed", "path": "checkpoint-10"}, "the state was lost: training went on from checkpoint-10"),
        (formed(3, 5), "world 3 went back to step 5 from step 7"),
    ):
        with pytest.raises(Wrong, match=complaint):
            check_journal([*sound, entry])


def test_workers_of_several_processes_have_no_disk_to_fill():
    for processes, kinds in ((1, {*Kind}), (2, {*Kind} - {Kind.FILL_DISK})):
        moments = schedule(1, 60, processes)
        assert {each.kind for moment in moments for each in moment.disturbances} == kinds
