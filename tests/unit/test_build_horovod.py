"""scripts/build_horovod.py: for which frameworks Horovod is built, and under which name its wheel is kept."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_horovod.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_horovod", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("variables", "labels"),
    [
        ({}, ["torch", "tf"]),
        ({"HOROVOD_WITHOUT_TENSORFLOW": "1"}, ["torch"]),
        ({"HOROVOD_WITHOUT_PYTORCH": "1"}, ["tf"]),
        ({"HOROVOD_WITHOUT_TENSORFLOW": "0"}, ["torch", "tf"]),
    ],
)
def test_each_framework_can_be_left_out(script, variables, labels):
    frameworks = script.wanted(variables)
    assert [framework.label for framework in frameworks] == labels
    built = script.build_environment(frameworks, "")
    assert {"torch": "HOROVOD_WITH_PYTORCH" in built, "tf": "HOROVOD_WITH_TENSORFLOW" in built} == {
        "torch": "torch" in labels,
        "tf": "tf" in labels,
    }


def test_without_any_framework_there_is_nothing_to_build(script):
    with pytest.raises(script.BuildError, match="leave nothing to build for"):
        script.wanted({"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_PYTORCH": "1"})


def test_the_wheels_name_holds_what_it_was_built_for(script):
    torch, tensorflow = script.wanted({})
    name = f"horovod-0.28.1-cp3{sys.version_info.minor}-torch{version('torch')}"
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", script.cache_key([torch], ""))
    assert re.fullmatch(rf"{re.escape(name)}-nccl-[0-9a-f]{{8}}", script.cache_key([torch], "NCCL"))
    assert script.cache_key([torch, tensorflow], "").startswith(f"{name}-tf")


def test_a_framework_that_is_not_there_is_told_with_what_to_do(script):
    missing = script.Framework("PYTORCH", "torch", ("no-such-package",))
    with pytest.raises(script.BuildError, match=r"no-such-package is not installed: .*HOROVOD_WITHOUT_PYTORCH=1"):
        script.cache_key([missing], "")
