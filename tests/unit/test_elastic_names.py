"""What `elasticdl.elastic` offers as a package, in a process that has imported nothing of it yet."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from elasticdl.elastic import core, training; print(core.__name__)", "elasticdl.elastic.core\n"),
        ("import elasticdl.elastic; elasticdl.elastic.steps", "call elasticdl.elastic.torch.init("),
        ("import elasticdl.elastic; print(hasattr(elasticdl.elastic, 'step'))", "False\n"),
    ],
)
def test_the_names_of_the_package(program, expected):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False)
    assert expected in done.stdout + done.stderr
