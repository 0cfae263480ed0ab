"""`elasticdl train` with real processes and real Horovod: the model does not depend on what happens to the workers."""

import json
import random
import signal
import sys
from collections import Counter

import pytest
from running_job import QUICK_KERAS, ZOO, run_cli, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.sample_records import consumed
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.job.spec import JobSpec
from elasticdl.worker.learner import build_model
from elasticdl.worker.zoo import load_module

STEPS = 120  # that are compared with those of the framework alone
SAMPLES, BATCH = 1500, 250


def train(model, *options):
    digits = ("--model_zoo", str(ZOO), "--model_def", model, "--global_batch_size", str(BATCH))
    return ["train", *digits, "--max_worker_batch_size", "50", *options]


def paced(seconds, **options):
    values = {"fixed_seconds": seconds, **options}
    return ["--model_params", "; ".join(f"{name}={value!r}" for name, value in values.items())]


def losses(folder):
    scalars = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    scalars.Reload()
    return {event.step: event.value for event in scalars.Scalars("loss")}


def plain_curve(model_def):
    """Losses of every step as the framework alone makes them: whole batches, and none of this project but their order."""
    spec = JobSpec(model_zoo=str(ZOO), model_def=model_def)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", list(sys.path))
        module = load_module(spec)
    model, data = build_model(module, spec.seed), module.dataset("training", "")
    if model_def == "slow_keras":
        model.compile(optimizer=module.optimizer(), loss=module.loss)
    else:
        optimizer = module.optimizer(model.parameters())
    curve = {}
    for epoch in range(STEPS * BATCH // SAMPLES):
        order = epoch_order(SAMPLES, spec.seed, epoch)
        for first in range(0, SAMPLES, BATCH):
            inputs, labels = data[order[first : first + BATCH]]
            if model_def == "slow_keras":
                model.reset_metrics()
                curve[len(curve) + 1] = float(model.train_on_batch(inputs, labels))
            else:
                optimizer.zero_grad()
                loss = module.loss(labels, model(inputs))
                loss.backward()
                optimizer.step()
                curve[len(curve) + 1] = loss.item()
    return curve


def require_curve(ours, model_def):
    assert sorted(ours) == list(range(1, max(ours) + 1)), "a step is missing"
    for step, loss in plain_curve(model_def).items():
        assert ours[step] == pytest.approx(loss, rel=1e-5, abs=1e-7), f"step {step}"


def disturb(job, start_with, most, steps):
    """Grow, SIGKILL of rank 0, SIGTERM of another, and 2 in the end, each at a random step; who goes is replaced."""
    rng = random.Random(5)

    def some_steps_later():
        job.wait_for_step(job.steps_recorded() + rng.randint(1, steps))

    job.wait_for_world(size=start_with)
    some_steps_later()
    job.scale(start_with, most)
    world = job.wait_for_world(size=most)
    some_steps_later()
    for number, gone in ((signal.SIGKILL, world["members"][0]), (signal.SIGTERM, rng.choice(world["members"][1:]))):
        job.signal(gone, number)
        world = job.wait_for_world_without(gone)
        world = job.wait_for_world(size=most, after=world["world"] - 1)
        some_steps_later()
    job.scale(2)
    job.wait_for_world(size=2, after=world["world"])
    some_steps_later()


@pytest.mark.timeout(600)  # with Keras seven processes import TensorFlow, which takes its time on a busy machine
@pytest.mark.parametrize(
    ("model_def", "epochs", "disturbances"), [("paced_mlp", 100, (2, 4, 8)), ("slow_keras", 50, (1, 3, 3))]
)
def test_workers_that_come_and_go_do_not_show_in_the_losses(tmp_path, model_def, epochs, disturbances):
    board, slow = tmp_path / "board", tmp_path / "slow"
    slow.touch()
    given = paced(0.03, slow_while=str(slow)) if model_def == "paced_mlp" else []
    given += ["--output", str(tmp_path / "out"), "--tensorboard_log_dir", str(board), "--num_epochs", str(epochs)]
    given += ["--num_workers", str(disturbances[0])]
    with start(tmp_path, *train(model_def, *given), TEST_SLOW_WHILE=str(slow), **QUICK_KERAS) as job:
        disturb(job, *disturbances)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        assert "without the fork server" not in job.job.master_log.read_text()  # all were forked
        pauses, counted = job.entries("pause"), consumed(job.record_files())
    ours = losses(board)
    require_curve(ours, model_def)
    assert sorted(counted) == list(range(epochs))
    for epoch, counts in counted.items():
        assert counts == Counter(range(SAMPLES)), f"epoch {epoch}: a sample was lost or repeated"
    assert {pause["kind"] for pause in pauses} == {"grow", "shrink", "failure"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("succeeded", max(ours))
    assert len(summary["worlds"]) >= 5
    assert summary["metrics"]["accuracy"] > 0.9


def test_two_killed_at_once_one_more_while_the_world_forms_and_one_that_freezes(tmp_path):
    given = ["--num_workers", "1-5", "--num_epochs", "1000000", "--heartbeat_timeout", "3", *paced(0.02)]
    with start(tmp_path, *train("paced_mlp", *given)) as job:
        world = job.wait_for_world(size=5)
        job.wait_for_step(job.steps_recorded() + 2)
        first, second, third, *survivors = world["members"]  # rank 0 among them
        job.signal(first, signal.SIGKILL)
        job.signal(second, signal.SIGKILL)
        job.wait_for("broken world", lambda: job.entries("world_broken"))
        job.signal(third, signal.SIGKILL)
        job.wait_for("the survivors' pause", lambda: {p["worker"] for p in job.entries("pause")} >= set(survivors))
        job.wait_for_step(job.steps_recorded() + 5)
        worst = max(pause["total"] for pause in job.entries("pause") if pause["worker"] in survivors)
        assert worst < 15, "somebody waited out a timeout of Gloo"
        frozen = job.wait_for_world(size=5, after=world["world"])["members"][0]
        job.signal(frozen, signal.SIGSTOP)
        after = job.wait_for_world_without(frozen)
        job.wait_for("steps", lambda: any(pause["world"] >= after["world"] for pause in job.entries("pause")))
        job.stop()
        assert job.finish() == 1, job.describe()
        left = {entry["worker"]: entry["cause"] for entry in job.entries("worker_left")}
        assert [left[worker] for worker in (first, second, third, frozen)] == ["killed", "killed", "killed", "frozen"]


def test_an_error_of_the_user_stops_the_job_once_with_its_traceback_first(tmp_path):
    given = ["--num_workers", "3", "--num_epochs", "1000", *paced(0.0, fail_at=50)]
    with start(tmp_path, *train("paced_mlp", *given)) as job:
        assert job.finish() == 1
        assert job.output.count("Traceback (most recent call last)") == 1
        assert 'raise KeyError("a mistake of the user\'s")' in job.output
        assert "paced_mlp.py" in job.output
        assert len(job.entries("worker_launched")) == 3


@pytest.mark.slow
def test_interrupting_leaves_a_checkpoint_from_which_another_number_of_workers_goes_on(tmp_path):
    board = tmp_path / "board"
    given = ["--num_epochs", "1000", "--max_step", str(STEPS), "--checkpoint_dir", str(tmp_path / "kept")]
    given += ["--checkpoint_steps", "10000", "--tensorboard_log_dir", str(board), *paced(0.02)]
    with start(tmp_path, *train("paced_mlp", *given, "--num_workers", "3"), name="first") as job:
        job.wait_for_world(size=3)
        job.wait_for_step(25)
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.describe()
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".pt"]
    with start(tmp_path, *train("paced_mlp", *given, "--num_workers", "2"), name="second") as job:
        assert job.finish() == 0, job.describe()
        (resumed, *_) = job.entries("resumed")
    assert resumed["step"] >= 25
    require_curve(losses(board), "paced_mlp")
    for epoch, counts in consumed(sorted((tmp_path / "record").glob("*.jsonl"))).items():
        assert set(counts.values()) == {1}, f"epoch {epoch}"


# Of 64 samples and one worker a step takes 0.1 s, of which more workers save no more than 0.05 s: each of two does 0.67 of
# what one does alone, each of three 0.5.
SCALES = [
    *("--global_batch_size", "64", "--num_epochs", "1000", "--collective", "torch", "--num_workers", "1-4"),
    *("--scale_policy", "efficiency", "--min_efficiency", "0.57", "--checkpoint_steps", "10"),
]


@pytest.mark.slow
def test_a_job_stays_where_it_pays_and_one_that_goes_on_from_its_checkpoint_knows(tmp_path):
    model = ("--model_zoo", str(ZOO), "--model_def", "paced_mlp", *paced(0.05, sample_seconds=0.05 / 64))
    given = ["train", *model, *SCALES, "--checkpoint_dir", str(tmp_path / "kept"), "--output", str(tmp_path / "out")]
    with start(tmp_path, *given, name="first") as job:
        job.wait_for_world(size=2)
        stays = "stays at 2: of 3 workers each"
        job.wait_for("the decision", lambda: any(e["reason"].startswith(stays) for e in job.entries("decision")))
        shown = run_cli(tmp_path, "status", "first").stdout.splitlines()
        assert [line for line in shown if line.startswith("scaling: 2 workers do 1.")]
        assert [line for line in shown if line.startswith("scaling: stays at 2")]
        job.wait_for_step(job.steps_recorded() + 15)  # a checkpoint with all that
        run_cli(tmp_path, "stop", "first")
        assert job.finish() == 1, "somebody else stopped it"
        assert max(len(world["members"]) for world in job.entries("world_formed")) == 2
        assert not job.entries("warning")
    scaling = json.loads((tmp_path / "out" / "summary.json").read_text())["scaling"]
    assert (scaling["workers"], scaling["curve"][0]["workers"]) == (2, 1)
    with start(tmp_path, *given, name="second") as job:
        job.wait_for("first advice", lambda: job.entries("advice"))
        assert {point["workers"]: point for point in job.entries("advice")[0]["curve"]}[2]["measured"]
        run_cli(tmp_path, "stop", "second", "--now")
        job.finish()
