"""Scripts under `elasticdl run` that do not train with others, or forgot something: each gets the line that helps."""

from functools import partial

import pytest
from running_job import start

LOOP = """\
import multiprocessing
import os
import signal
import torch
import elasticdl.elastic.torch as elastic

elastic.init(8, 4)
loader = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), num_workers=PROCESSES)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state):
    for epoch in state.loader.epochs(10):
        for batch in state.loader:
            for (inputs,) in batch:
                batch.backward(model(inputs).mean())
            optimizer.step()
            COMMIT
        EACH_EPOCH


train(state)
"""
OWN_LOOP = "import elasticdl.elastic.torch as elastic\nelastic.init(8, 4)\n"
UNPREPARED = """
import torch, elasticdl.elastic, elasticdl.elastic.torch
elasticdl.elastic.torch.init(8, 4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(elasticdl.elastic.batch_size, 2)).mean().backward()
optimizer.step()
"""
REFUSED = "import elasticdl.elastic.torch as elastic\nelastic.prepare(None)\n"
NO_HOROVOD = "import sys\nsys.modules['horovod'] = None\n"
# A pool that is ended, a worker that ends with 0 too early, fewer epochs than planned, and ends without another word.
ODD_ENDS = """\
if epoch == 0:  # a forked pool's processes are ended by SIGTERM, which to the worker means to leave
            pool = multiprocessing.get_context("fork").Pool(1)
            pool.map(len, [[1]])
            pool.terminate()
        if epoch == 2 and elastic.rank() == 1 and not os.path.exists(__file__ + ".mark"):
            open(__file__ + ".mark", "w").close()
            os._exit(0)  # in the midst of the training
        if epoch == 3:
            return  # of ten"""
SILENT_ENDS = "os.kill(os.getpid(), signal.SIGKILL) if elastic.rank() else os._exit(0)\n"


def loop(each_epoch="pass", processes=0, commit="state.commit()"):
    return LOOP.replace("EACH_EPOCH", each_epoch).replace("PROCESSES", str(processes)).replace("COMMIT", commit)


slow = partial(pytest.param, marks=pytest.mark.slow)  # each is a job


@pytest.mark.parametrize(
    ("text", "options", "code", "words", "launched"),
    [
        (OWN_LOOP, ["2"], 1, "ended with exit code 0 after elastic.init() and has not trained together with others", None),
        slow(loop("epoch == 1 and exit(0)"), ["2"], 1, "sys.exit(0) was called within training: return from the function below @elastic.run", 2),
        slow(NO_HOROVOD + loop(), ["1", "--collective", "horovod"], 1, "Horovod with PyTorch is needed and can't be imported", 1),
        slow(loop(processes=2), ["1"], 1, "which imports the script anew: put what the script does below", 1),
        slow(UNPREPARED, ["1"], 1, "optimizer.step() under `elasticdl run`, before the loop was prepared", 1),
        (REFUSED, ["2"], 1, "prepare", 2),
        slow(loop(commit="pass"), ["1"], 0, "warning: 20 steps were made without a state.commit()", 1),
        (loop(ODD_ENDS) + SILENT_ENDS, ["2"], 0, "succeeded: 8 steps", 3),
    ],
    ids=["a loop of one's own", "sys.exit", "no Horovod", "no guard", "not prepared", "refused before it joins", "no commit", "odd ends"],
)  # fmt: skip
def test_the_job_says_at_once_what_helps(tmp_path, text, options, code, words, launched):
    script = tmp_path / "script.py"
    script.write_text(text)
    with start(tmp_path, "run", "--num_workers", *options, "--", "python", str(script)) as job:
        assert job.finish() == code, job.describe()
        assert words in job.output
        assert ("succeeded" in job.output) == (code == 0)
        assert launched in (None, len(job.entries("worker_launched"))), job.describe()
        assert text != REFUSED or "Traceback" not in job.output
