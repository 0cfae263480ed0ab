"""scripts/build_horovod.py: for which frameworks Horovod is built, and under which name its wheel is kept."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from refusal_kit import refused

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TORCH, BOTH = {"torch": "2.13.0"}, {"torch": "2.13.0", "tf": "2.21.0"}
WHEEL = "horovod-0.28.1-cp311.whl"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "build_horovod", raising=False)
    return importlib.import_module("build_horovod")


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
    assert [f"HOROVOD_WITH_{name}" in built for name in ("PYTORCH", "TENSORFLOW")] == [
        x in labels for x in ("torch", "tf")
    ]


def test_a_framework_that_is_not_there_is_told_with_what_to_do(script):
    missing = script.Framework("PYTORCH", "torch", ("no-such-package",))
    told = r"^no-such-package is not installed: .*HOROVOD_WITHOUT_PYTORCH=1"
    refused(told, missing.version, script.BuildError)


def put(cache: Path, key: str) -> Path:
    (cache / key).mkdir(parents=True)
    (cache / key / WHEEL).touch()
    return cache / key


def test_a_wheel_for_both_frameworks_serves_torch_alone_and_not_the_other_way_round(script, tmp_path):
    """The wheel's name holds what it was built for."""
    name = f"horovod-0.28.1-cp3{sys.version_info.minor}-torch2.13.0"
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", script.cache_key(TORCH, ""))
    assert re.fullmatch(rf"{re.escape(name)}-nccl-[0-9a-f]{{8}}", script.cache_key(TORCH, "NCCL"))
    assert script.cache_key(BOTH, "").startswith(f"{name}-tf2.21.0-")
    assert script.wanted({})[0].version() == version("torch")
    assert script.cached(tmp_path, TORCH, "") is None
    wider = put(tmp_path, script.cache_key(BOTH, ""))
    assert (script.cached(tmp_path, TORCH, ""), script.cached(tmp_path, TORCH, "NCCL")) == (wider, None)
    exact = put(tmp_path, script.cache_key(TORCH, ""))
    gpus = put(tmp_path, script.cache_key(BOTH, "NCCL"))
    assert script.cached(tmp_path, TORCH, "") == exact
    assert script.cached(tmp_path, TORCH, "NCCL") == gpus, "and one for GPUs no torch for CPUs"
    (wider / WHEEL).unlink()
    assert script.cached(tmp_path, BOTH, "") is None, "a folder without a wheel is none"


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(2, 24, 2), (16, 24, 12), (16, 3, 1), (1, 64, 1), (4, 0, 1)]
)
def test_as_many_compilers_run_as_cores_and_memory_allow(script, cores, gigabytes, expected):
    assert script.compilers(cores, gigabytes << 30) == expected


@pytest.mark.parametrize("fails", [True, False])
def test_a_build_leaves_a_whole_wheel_or_none_and_removes_what_a_killed_one_has_left(
    script, monkeypatch, tmp_path, fails
):
    def compiled(source, out, log, env, lock):
        out.mkdir()
        if fails:
            raise script.BuildError("the build of Horovod failed")
        (out / WHEEL).touch()

    for name, does in {"fetch_source": lambda into: into, "apply_edits": lambda source: None}.items():
        monkeypatch.setattr(script, name, does)
    monkeypatch.setattr(script, "build_environment", lambda frameworks, gpu_operations: {})
    monkeypatch.setattr(script, "compile_wheel", compiled)
    put(tmp_path, f"{script.SCRATCH}of-a-killed-one")
    if fails:
        refused("the build of Horovod failed", lambda: script.build(tmp_path, [], TORCH, ""), script.BuildError)
    else:
        assert script.build(tmp_path, [], TORCH, "") == script.cached(tmp_path, TORCH, "")
    left = ["build.lock"] if fails else ["build.lock", script.cache_key(TORCH, "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_full_disk_is_told_before_anything_is_fetched(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "DISK_BYTES", 1 << 60)
    refused(r"MB left; the build takes", lambda: script.build(tmp_path, [], TORCH, ""), script.BuildError)
