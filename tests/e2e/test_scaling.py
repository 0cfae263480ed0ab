"""Real jobs that choose their number of workers: where it stops to pay they stay, and a resumed job knows it."""

from __future__ import annotations

import json

from running_job import ZOO, run_cli, start

# Of 64 samples and one worker a step takes 0.1 s, of which more workers save no more than 0.05 s: each of two does 0.67 of
# what one does alone, each of three 0.5.
TRAIN = [
    *("train", "--model_zoo", str(ZOO), "--model_def", "paced_mlp"),
    *("--global_batch_size", "64", "--num_epochs", "1000"),
    *("--model_params", f"sample_seconds={0.05 / 64}; fixed_seconds=0.05", "--collective", "torch"),
    *("--num_workers", "1-4", "--scale_policy", "efficiency", "--min_efficiency", "0.57", "--checkpoint_steps", "10"),
]


def stays(job):
    return [entry for entry in job.entries("decision") if entry["reason"].startswith("stays at 2: of 3 workers each")]


def test_a_job_stays_where_it_pays_and_one_that_goes_on_from_its_checkpoint_knows(tmp_path):
    kept = ["--checkpoint_dir", str(tmp_path / "kept"), "--output", str(tmp_path / "out")]
    with start(tmp_path, *TRAIN, *kept, name="first") as job:
        job.wait_for_world(size=2)
        job.wait_for("the decision to stay", lambda: stays(job))
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
    with start(tmp_path, *TRAIN, *kept, name="second") as job:
        job.wait_for("first advice", lambda: job.entries("advice"))
        speedup = {point["workers"]: point for point in job.entries("advice")[0]["curve"]}[2]
        assert speedup["measured"]
        run_cli(tmp_path, "stop", "second", "--now")
        job.finish()
