"""Keras with real processes and real Horovod: whatever happens to the workers, the losses are those of plain Keras.

More histories, and resuming, are in ``tests/unit/test_elastic_keras*.py`` and ``test_worker_keras.py``: there, not every
worker has to import TensorFlow.
"""

import csv
import json
import sys

import pytest
from running_job import QUICK_KERAS, ZOO, start
from test_training import BATCH, SAMPLES, assert_each_sample_once, disturb, losses

from elasticdl.elastic.core.plan import epoch_order
from elasticdl.job.spec import JobSpec

EPOCHS = 50
TRAIN = (
    *("train", "--model_zoo", str(ZOO), "--model_def", "slow_keras", "--global_batch_size", str(BATCH)),
    *("--max_worker_batch_size", "50", "--num_workers", "1", "--num_epochs", str(EPOCHS)),
)


@pytest.fixture
def curve(monkeypatch):
    """Losses of every step as Keras alone makes them: one process, whole batches, none of this project but the order."""
    from elasticdl.worker.learner import build_model
    from elasticdl.worker.zoo import load_module

    monkeypatch.setattr("sys.path", list(sys.path))
    spec = JobSpec(model_zoo=str(ZOO), model_def="slow_keras")
    module = load_module(spec)
    model = build_model(module, spec.seed)
    model.compile(optimizer=module.optimizer(), loss=module.loss)
    data = module.dataset("training", "")
    found = {}
    for epoch in range(EPOCHS):
        order = epoch_order(SAMPLES, spec.seed, epoch)
        for first in range(0, SAMPLES, BATCH):
            model.reset_metrics()
            batch = order[first : first + BATCH]
            found[len(found) + 1] = float(model.train_on_batch(data.images[batch], data.labels[batch]))
    return found


@pytest.mark.timeout(600)  # seven processes import TensorFlow, which takes its time on a busy machine
def test_workers_that_come_and_go_give_the_losses_of_plain_keras(curve, tmp_path):
    board, out, written, slow = (tmp_path / name for name in ("board", "out", "written", "slow"))
    written.mkdir()
    slow.touch()
    pace = {"TEST_MICRO_BATCH_SECONDS": "0.7", "TEST_SLOW_WHILE": str(slow), "TEST_CALLBACK_FOLDER": str(written)}
    folders = ["--tensorboard_log_dir", str(board), "--output", str(out)]
    with start(tmp_path, *TRAIN, *folders, **pace, **QUICK_KERAS) as job:
        disturb(job, 1, 3, 3)
        slow.unlink()  # all has happened: the rest may be as fast as it can
        assert job.finish() == 0, job.describe()
        pauses, files = job.entries("pause"), job.record_files()
    ours = losses(board)
    assert ours.keys() == curve.keys(), "a step is missing"
    for step, loss in ours.items():
        assert loss == pytest.approx(curve[step], rel=1e-5, abs=1e-7), f"step {step}"
    assert_each_sample_once(files, EPOCHS)
    assert {pause["kind"] for pause in pauses} == {"grow", "shrink", "failure"}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("succeeded", EPOCHS * SAMPLES // BATCH)
    assert summary["metrics"]["accuracy"] > 0.9
    assert {path.name for path in out.iterdir()} == {"summary.json", "model.keras", "saved_model"}
    rows = list(csv.DictReader((written / "epochs.csv").open()))
    # The one who was killed may have been about to write a row; whoever followed it goes on in the same file.
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
