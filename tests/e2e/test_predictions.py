"""`elasticdl predict` and `elasticdl evaluate` with real processes: each sample once, whatever happens to the workers."""

import json
import signal

import numpy as np
import pytest
from running_job import QUICK_KERAS, ZOO, run_cli, start

SAMPLES = 1500
SMALL = ("--minibatch_size", "10", "--num_minibatches_per_task", "3")


def of_module(task, model_def, home):
    module = ["--model_zoo", str(ZOO), "--model_def", model_def]
    return [task, *module, "--checkpoint_dir", str(home / "kept"), "--sample_record", str(home / "record")]


def train(home, model_def, **env):
    assert run_cli(home, *of_module("train", model_def, home), "--max_step", "1", env=env).returncode == 0


def kill_one_meanwhile(job):
    """A worker in the midst, and later rank 0."""
    world = job.wait_for_world(size=3)
    for gone in (world["members"][1], world["members"][0]):
        job.wait_for_step(job.steps_recorded() + 3)
        job.signal(gone, signal.SIGKILL)
        job.wait_for_world_without(gone)
    assert job.finish() == 0, job.describe()
    assert {entry["cause"] for entry in job.entries("worker_left")} >= {"killed"}


@pytest.mark.timeout(300)
def test_predictions_are_written_in_order_once_each_and_processed(tmp_path):
    processed, out = tmp_path / "processed", tmp_path / "out.npz"
    processed.mkdir()
    train(tmp_path, "echo_torch")
    given = [*of_module("predict", "echo_torch", tmp_path), "--output", str(out), "--num_workers", "3", *SMALL]
    slow = {"TEST_PROCESSED": str(processed), "TEST_SAMPLE_SECONDS": "0.01"}
    with start(tmp_path, *given, **slow) as job:
        kill_one_meanwhile(job)
        (written,) = job.entries("predicted")
    assert written["samples"] == SAMPLES
    with np.load(out) as found:
        np.testing.assert_array_equal(found["once"], np.arange(SAMPLES))
        np.testing.assert_array_equal(found["twice"], np.arange(SAMPLES)[:, None] * [1, 2])
    lines = [int(line) for path in processed.iterdir() for line in path.read_text().splitlines()]
    assert set(lines) == set(range(SAMPLES))
    assert len(lines) <= SAMPLES + 2 * 30, "more than the parts in the hands of the two that were killed"
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set(), "a part is left"
    again = run_cli(tmp_path, *given, env=slow)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "exists" in again.stderr


@pytest.mark.timeout(300)
def test_metrics_are_those_of_all_samples_also_where_a_stopped_evaluation_goes_on(tmp_path):
    train(tmp_path, "echo_keras", **QUICK_KERAS)
    out = tmp_path / "out.json"
    given = [*of_module("evaluate", "echo_keras", tmp_path), "--output", str(out), "--num_workers", "3", *SMALL]
    slow = {"TEST_SAMPLE_SECONDS": "0.01", **QUICK_KERAS}
    with start(tmp_path, *given, **slow) as job:
        job.wait_for_world(size=3)
        job.wait_for_step(3)
        job.stop()
        assert job.finish() == 1, job.describe()
        assert not out.exists()
    with start(tmp_path, *given, **slow) as job:
        job.wait_for("its place", lambda: job.entries("resumed"))  # in a journal of its own
        kill_one_meanwhile(job)
    found = json.loads(out.read_text())
    assert found["samples"] == SAMPLES
    whole = {"loss": 0.0, "sum": SAMPLES * (SAMPLES - 1) / 2, "largest": SAMPLES - 1, "error": 0.0}
    assert found["metrics"] == pytest.approx(whole)


SCRIPT = """\
import time
import numpy as np
import elasticdl.elastic.FRAMEWORK as elastic

class Slow(LAYER):
    def FORWARD(self, inputs):
        time.sleep(0.03)
        return inputs

if __name__ == "__main__":
    elastic.init(64, 16)
    numbers = np.arange(1500.0, dtype=np.float32)[:, None]
    metrics = {"rows": lambda labels, outputs: float(len(labels)), "error": lambda labels, outputs: float(np.abs(np.subtract(outputs, labels)).max())}
    print("found", elastic.evaluate(Slow(), DATA, metrics), elastic.evaluate(Slow(), DATA, metrics))
    TRAINS
"""
TORCH = {"FRAMEWORK": "torch", "LAYER": "torch.nn.Module", "FORWARD": "forward", "numpy as np": "numpy as np, torch"}
KERAS = {"FRAMEWORK": "keras", "LAYER": "keras.Model", "FORWARD": "call", "numpy as np": "numpy as np, keras"}
TORCH_DATA = "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*[torch.tensor(numbers)] * 2), 16)"
KERAS_DATA = "list(zip(numbers, numbers))"
TRAINS = "model = torch.nn.Linear(1, 1)\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
TRAINS += "    elastic.run(print)(elastic.TorchState(model=model, optimizer=optimizer, loader=elastic.DataLoader(DATA.dataset)))"


@pytest.mark.parametrize(
    ("given", "dies"),
    [
        ({**TORCH, "TRAINS": "", "DATA": TORCH_DATA}, True),
        pytest.param({**KERAS, "TRAINS": "", "DATA": KERAS_DATA}, True, marks=pytest.mark.slow),
        pytest.param({**TORCH, "TRAINS": TRAINS, "DATA": TORCH_DATA}, False, marks=pytest.mark.slow),
    ],
    ids=["torch", "keras", "then trains"],
)
def test_a_script_that_only_evaluates_is_divided_over_its_workers(tmp_path, given, dies):
    script, text = tmp_path / "script.py", SCRIPT
    for name, value in given.items():
        text = text.replace(name, value)
    script.write_text(text)
    with start(tmp_path, "run", "--num_workers", "2", "--", "python", str(script), **QUICK_KERAS) as job:
        if dies:
            world = job.wait_for_world(size=2)
            job.signal(world["members"][0], signal.SIGKILL)
            job.wait_for_world_without(world["members"][0])
        assert job.finish() == (0 if dies else 1), job.describe()
        assert "found {'rows': 1500.0, 'error': 0.0} {'rows': 1500.0, 'error': 0.0}" in job.output
        assert dies or "training was complete already" in job.output
