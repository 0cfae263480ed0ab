"""Scripts whose data are loaded by processes, each of which imports the script anew."""

import signal
from pathlib import Path

import pytest
from running_job import start

SCRIPT = str(Path(__file__).parent / "scripts" / "loader_processes.py")
WARM = ["torch", "torch._dynamo", "elasticdl.elastic.torch"]
EPOCHS = 8
STEPS = 6 * EPOCHS

UNGUARDED = """\
import torch
import elasticdl.elastic.torch as elastic

elastic.init(8, 4)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), num_workers=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state):
    for batch in state.loader:
        for (inputs,) in batch:
            batch.backward(model(inputs).mean())
        optimizer.step()
        state.commit()


train(state)
"""
LAST_LINE = len(UNGUARDED.splitlines())


def test_every_step_is_made_though_each_process_that_loads_data_calls_init(alone, tmp_path):
    plain, elastic, slow = tmp_path / "plain", tmp_path / "elastic", tmp_path / "slow"
    alone.run_well(SCRIPT, plain, str(EPOCHS))
    slow.touch()
    arguments = ["--num_workers", "2", "--", "python", SCRIPT, str(elastic), str(EPOCHS)]
    with start(tmp_path, "run", *arguments, TEST_SLOW_WHILE=str(slow)) as job:
        world = job.wait_for_world(size=2)["world"]
        job.wait_for("a few steps", lambda: len(read_steps(elastic)) > 3)
        job.signal(0, signal.SIGKILL)
        world = job.wait_for_world(size=2, after=world)["world"]
        job.signal(1, signal.SIGTERM)
        job.wait_for_world(size=2, after=world)
        slow.unlink()
        assert job.finish() == 0, job.describe()
        assert len(job.entries("worker_started")) == 4
        assert f"succeeded: {STEPS} steps" in job.output
    ours, theirs = dict(read_steps(elastic)), dict(read_steps(plain))
    assert sorted(theirs) == list(range(1, STEPS + 1))
    # What a rank 0 that was killed did not come to write, nobody wrote.
    assert len(ours) >= STEPS - 1
    for step, loss in ours.items():
        assert loss == pytest.approx(theirs[step], rel=1e-5, abs=1e-7), f"step {step}"


def test_processes_that_are_spawned_open_no_session_either(tmp_path):
    arguments = ["--num_workers", "1", "--", "python", SCRIPT, str(tmp_path / "curve"), "1", "--spawn"]
    with start(tmp_path, "run", *arguments) as job:
        assert job.finish() == 0, job.describe()
        assert "succeeded: 6 steps" in job.output
        assert len(job.entries("worker_ready")) == 1
    assert [step for step, _ in read_steps(tmp_path / "curve")] == [1, 2, 3, 4, 5, 6]


def read_steps(path):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if line.endswith("\n")]


def test_a_script_without_a_guard_is_told_what_to_write(alone, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    expected = (
        f"{script}:{LAST_LINE}: with num_workers=2 each process that loads data imports this script and would train"
    )
    done = alone.run(script)
    assert done.returncode == 2
    assert expected in done.stderr
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(script)) as job:
        assert job.finish() == 1
        assert expected in job.output
        assert len(job.entries("worker_started")) == 1


def test_a_process_that_imports_the_script_does_not_train(alone, tmp_path):
    script = tmp_path / "script.py"
    body = UNGUARDED.replace(", num_workers=2", "")
    script.write_text(
        f"import multiprocessing\n{body}\nif __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print, args=('never',))\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    done = alone.run(script)
    assert done.returncode == 2
    assert "put what the script does below" in done.stderr
    assert "never" not in done.stdout
