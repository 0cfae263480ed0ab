"""PyTorch's CUDA build and TensorFlow in one process, in both orders. Each in a process of its own: the wrong order crashes."""

import importlib.util
import os
import subprocess
import sys

import pytest

from elasticdl.common.credentials import MASTER
from elasticdl.common.front_ends import FRONT_ENDS, TORCH, python_path

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch comes without triton")

FOR_TORCH = [*(each.module for each in FRONT_ENDS if each.first == TORCH), "elasticdl.ga.torch"]
MAKE_OPTIMIZER = "torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)"


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


def test_tensorflow_may_come_after_our_front_end_for_pytorch():
    done = run(f"import elasticdl.elastic.torch, elasticdl.tensorflow, tensorflow, torch; {MAKE_OPTIMIZER}")
    assert done.returncode == 0, done.stderr


def test_front_ends_for_pytorch_refuse_a_script_that_has_imported_tensorflow_first():
    script = f"""
import importlib, tensorflow
from elasticdl.common.errors import UserError
for name in {FOR_TORCH}:
    try:
        importlib.import_module(name)
    except UserError as error:
        print(name, error)
import elasticdl.elastic.torch
"""
    done = run(script)
    told = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in told] == FOR_TORCH
    for name, line in zip(FOR_TORCH, told, strict=True):
        assert f"move `import {name}` above `import tensorflow`" in line
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith(told[0].partition(" ")[2])
    assert "Traceback" not in done.stderr


def test_a_script_under_elasticdl_run_ends_with_the_line_that_helps_instead_of_crashing():
    done = run(f"import tensorflow, torch; {MAKE_OPTIMIZER}", **python_path(os.environ), **{MASTER: "127.0.0.1:1"})
    assert done.returncode == 2, done.stderr
    assert "move `import triton` above `import tensorflow`" in done.stderr.strip().splitlines()[-1]
