"""Scripts under `elasticdl run` that do not train with others, or forgot something: each gets the line that helps."""

import pytest
from running_job import run_alone, start

LOOP = """\
import multiprocessing
import os
import signal
import sys
import torch
import elasticdl.elastic.torch as elastic

elastic.init(8, 4)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), num_workers=PROCESSES)
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
        EACH_EPOCH


train(state)
"""
OWN_LOOP = "import elasticdl.elastic.torch as elastic\nelastic.init(8, 4)\n"
NO_HOROVOD = "import sys\nsys.modules['horovod'] = None\n"
# A pool that is ended, a worker that ends with 0 too early, fewer epochs than planned, and ends without another word.
ODD_ENDS = """\
if epoch == 0:  # a forked pool's processes are ended by SIGTERM, which to the worker means to leave
            pool = multiprocessing.get_context("fork").Pool(1)
            pool.map(len, [[1]])
            pool.terminate()
        if epoch == 2 and elastic.rank() == 1 and not os.path.exists("MARK"):
            open("MARK", "w").close()
            os._exit(0)  # in the midst of the training
        if epoch == 3:
            return  # of five"""
SILENT_ENDS = "os.kill(os.getpid(), signal.SIGKILL) if elastic.rank() else os._exit(0)\n"


def loop(each_epoch="pass", processes=0):
    return LOOP.replace("EACH_EPOCH", each_epoch).replace("PROCESSES", str(processes))


@pytest.mark.parametrize(
    ("text", "workers", "options", "words"),
    [
        (OWN_LOOP, 2, [], "ended with exit code 0 after elastic.init() and has not trained together with others"),
        (loop("if elastic.rank() == 0: return"), 2, [], "1 of 2 workers ended their training after step 2 and the others go on"),
        (loop("epoch == 1 and exit(0)"), 2, [], "sys.exit(0) was called within training: return from the function below @elastic.run"),
        (NO_HOROVOD + loop(), 1, ["--collective", "horovod"], "Horovod with PyTorch is needed and can't be imported"),
        (loop(processes=2), 1, [], "which imports the script anew: put what the script does below"),
    ],
    ids=["a loop of one's own", "different steps", "sys.exit", "no Horovod", "no guard"],
)  # fmt: skip
def test_the_job_fails_at_once_with_the_line_that_helps(tmp_path, text, workers, options, words):
    script = tmp_path / "script.py"
    script.write_text(text)
    with start(tmp_path, "run", "--num_workers", str(workers), *options, "--", "python", str(script)) as job:
        assert job.finish() == 1, job.describe()
        assert words.format(script=script) in job.output
        assert "succeeded" not in job.output
        assert text is OWN_LOOP or len(job.entries("worker_started")) == workers


def test_odd_ends_that_do_not_fail_a_job(tmp_path):
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(loop(ODD_ENDS.replace("MARK", str(mark))) + SILENT_ENDS)
    with start(tmp_path, "run", "--num_workers", "2", "--", "python", str(script)) as job:
        assert job.finish() == 0, job.describe()
        assert "succeeded: 8 steps" in job.output
        assert len(job.entries("worker_started")) == 3
        (early, *_) = job.entries("worker_left")
        assert early["reason"] == "ended with exit code 0 before its training was complete"
    assert mark.exists()


def test_a_forgotten_commit_is_told_of(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(loop().replace("            state.commit()\n", "").replace("epochs(5)", "epochs(10)"))
    with start(tmp_path, "run", "--num_workers", "1", "--", "python", str(script)) as job:
        assert job.finish() == 0, job.describe()
        assert "warning: 20 steps were made without a state.commit()" in job.output


def test_a_process_that_imports_the_script_does_not_train(tmp_path):
    script = tmp_path / "script.py"
    start_child = """
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("never",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
    script.write_text(loop() + start_child)
    assert "put what the script does below" in run_alone(script, code=2)
