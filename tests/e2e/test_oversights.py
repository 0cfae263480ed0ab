"""Scripts under `elasticdl run` that do not train with others, or forgot something: each gets the line that helps."""

import re
import signal
import sys
from pathlib import Path

import pytest
from running_job import start

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        pytest.param(
            *(
                "plain_loop.py",
                "ended with exit code 0 and took no part in the job: each process trains for itself unless",
            ),
            marks=pytest.mark.slow,  # as a master says it of any program, in test_master_process.py
        ),
        ("init_only.py", "ended with exit code 0 after elastic.init() and has not trained together with others"),
    ],
)
def test_a_script_that_trains_by_itself_does_not_succeed(tmp_path, script, line):
    with start(tmp_path, "run", "--num_workers", "2", "--", "python", str(SCRIPTS / script)) as job:
        assert job.finish() == 1, job.describe()
        assert re.search(rf"job job failed: worker [01] {re.escape(line)}", job.output)
        assert "below @elastic.run" in job.output
        assert "succeeded" not in job.output


def test_a_forgotten_commit_is_told_of(tmp_path):
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(SCRIPTS / "no_commit.py")) as job:
        assert job.finish() == 0, job.describe()
        assert "warning: 20 steps were made without a state.commit()" in job.output


EARLY = """
import os
import torch
import elasticdl.elastic.torch as elastic

elastic.init(8, 4)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state):
    for epoch in state.loader.epochs(5):
        for batch in state.loader:
            for (inputs,) in batch:
                batch.backward(model(inputs).mean())
            optimizer.step()
            state.commit()
        if STOPS:
            return


train(state)
AFTERWARDS
"""


def write(tmp_path, stops, afterwards=""):
    script = tmp_path / "script.py"
    script.write_text(EARLY.replace("STOPS", stops).replace("AFTERWARDS", afterwards))
    return ["--", "python", str(script)]


def test_workers_that_end_after_different_steps_fail_the_job(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", *write(tmp_path, "elastic.rank() == 0")) as job:
        assert job.finish() == 1, job.describe()
        assert "1 of 2 workers ended their training after step 2 and the others go on" in job.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_after_the_last_step_does_not_fail_the_job(tmp_path, rank):
    afterwards = f"if elastic.rank() == {rank}: os.kill(os.getpid(), {signal.SIGKILL.value})"
    with start(tmp_path, "run", "--num_workers", "2", *write(tmp_path, "False", afterwards)) as job:
        assert job.finish() == 0, job.describe()
        assert "succeeded: 10 steps" in job.output
        assert len(job.entries("worker_started")) == 2


EVENTFUL = EARLY.replace(
    "        if STOPS:\n            return\n",
    """\
        if epoch == 0:  # a forked pool's processes are ended by SIGTERM, which to the worker means to leave
            pool = multiprocessing.get_context("fork").Pool(1)
            pool.map(len, [[1]])
            pool.terminate()
        if epoch == 2 and elastic.rank() == 1 and not os.path.exists("MARK"):
            open("MARK", "w").close()
            os._exit(0)  # in the midst of the training
        if epoch == 3:
            return  # of five
""",
).replace("AFTERWARDS", "os.kill(os.getpid(), signal.SIGKILL) if elastic.rank() else os._exit(0)")


def test_odd_ends_that_do_not_fail_a_job(tmp_path):
    """A pool that is ended, a worker that ends with 0 too early, fewer epochs than planned, and ends without another word."""
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text("import multiprocessing\nimport signal\n" + EVENTFUL.replace("MARK", str(mark)))
    with start(tmp_path, "run", "--num_workers", "2", "--", "python", str(script)) as job:
        assert job.finish() == 0, job.describe()
        assert "succeeded: 8 steps" in job.output
        assert job.output.count("training has ended in epoch 4 of the 5 that its loop plans, after step 8") == 1
        assert len(job.entries("worker_started")) == 3
        (early, *_) = job.entries("worker_left")
        assert early["reason"] == "ended with exit code 0 before its training was complete"
    assert mark.exists()


def test_without_the_library_that_is_asked_for_the_job_fails_at_once(tmp_path):
    _, script = write(tmp_path, "False")[-2:]
    hidden = "import sys\nsys.modules['horovod'] = None\n"
    Path(script).write_text(hidden + Path(script).read_text())
    command = ["--num_workers", "1", "--collective", "horovod", "--", sys.executable, script]
    with start(tmp_path, "run", *command) as job:
        assert job.finish() == 1, job.describe()
        assert "Horovod with PyTorch is needed and can't be imported" in job.output
        assert len(job.entries("worker_started")) == 1


def test_leaving_by_sys_exit_within_training_fails_the_job_at_once(tmp_path):
    with start(tmp_path, "run", "--num_workers", "2", *write(tmp_path, "epoch == 1 and exit(0)")) as job:
        assert job.finish() == 1, job.describe()
        assert "sys.exit(0) was called within training: return from the function below @elastic.run" in job.output
        assert len(job.entries("worker_started")) == 2
