"""What `elasticdl.elastic` offers as a package, in a process that has imported nothing of it yet."""

import subprocess
import sys

import pytest


def said(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False)
    return done.stdout + done.stderr.splitlines()[-1] if done.stderr else done.stdout


@pytest.mark.parametrize("name", ["core", "training"])
def test_a_submodule_can_be_imported_from_the_package(name):
    assert said(f"from elasticdl.elastic import {name}; print({name}.__name__)") == f"elasticdl.elastic.{name}\n"


def test_a_number_before_init_says_what_to_call():
    assert "call elasticdl.elastic.torch.init(" in said("import elasticdl.elastic; elasticdl.elastic.steps")


def test_an_unknown_name_is_an_attribute_error():
    assert said("import elasticdl.elastic; print(hasattr(elasticdl.elastic, 'step'))") == "False\n"
