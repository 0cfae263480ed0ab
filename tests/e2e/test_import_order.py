"""PyTorch's CUDA build and TensorFlow in one process, in both orders. Each in a process of its own: the wrong order crashes."""

import importlib.util
import os
import subprocess
import sys

import pytest

from elasticdl.common.credentials import MASTER
from elasticdl.common.front_ends import FRONT_ENDS, TORCH, python_path

FOR_TORCH = [*(each.module for each in FRONT_ENDS if each.first == TORCH), "elasticdl.ga.torch"]
OPTIMIZER = "torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)"
OURS_LATE = f"""
import importlib, tensorflow
from elasticdl.common.errors import UserError
for name in {FOR_TORCH}:
    try:
        importlib.import_module(name)
    except UserError as error:
        assert f"move `import {{name}}` above `import tensorflow`" in str(error), error
        print(name)
import elasticdl.elastic.torch
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch comes without triton")
@pytest.mark.parametrize(
    ("script", "variables", "code", "said", "line"),
    [
        pytest.param(f"import elasticdl.elastic.torch, elasticdl.tensorflow, tensorflow, torch; {OPTIMIZER}", {}, 0, [], "",
            marks=pytest.mark.slow),
        (OURS_LATE, {}, 2, FOR_TORCH, "move `import elasticdl.elastic.torch` above `import tensorflow`"),
        pytest.param(f"import tensorflow, torch; {OPTIMIZER}", {**python_path(os.environ), MASTER: "127.0.0.1:1"}, 2, [],
            "move `import triton` above `import tensorflow`", marks=pytest.mark.slow),
    ],
    ids=["ours first", "TensorFlow first", "a script of a job"],
)  # fmt: skip
def test_tensorflow_comes_after_our_front_ends_for_pytorch_or_is_told_so(script, variables, code, said, line):
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (code, said), done.stderr
    assert line in (done.stderr.strip().splitlines() or [""])[-1]
    assert "Traceback" not in done.stderr or code == 0
