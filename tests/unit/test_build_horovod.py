"""scripts/build_horovod.py: for which frameworks Horovod is built, and under which name its wheel is kept."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


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
    assert {"torch": "HOROVOD_WITH_PYTORCH" in built, "tf": "HOROVOD_WITH_TENSORFLOW" in built} == {
        "torch": "torch" in labels,
        "tf": "tf" in labels,
    }


def test_the_wheels_name_holds_what_it_was_built_for(script):
    versions = {each.label: each.version() for each in script.wanted({})}
    name = f"horovod-0.28.1-cp3{sys.version_info.minor}-torch{version('torch')}"
    alone = {"torch": versions["torch"]}
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", script.cache_key(alone, ""))
    assert re.fullmatch(rf"{re.escape(name)}-nccl-[0-9a-f]{{8}}", script.cache_key(alone, "NCCL"))
    assert script.cache_key(versions, "").startswith(f"{name}-tf")


def test_a_framework_that_is_not_there_is_told_with_what_to_do(script):
    missing = script.Framework("PYTORCH", "torch", ("no-such-package",))
    with pytest.raises(script.BuildError, match=r"no-such-package is not installed: .*HOROVOD_WITHOUT_PYTORCH=1"):
        missing.version()


def put(cache: Path, key: str) -> Path:
    (cache / key).mkdir(parents=True)
    (cache / key / "horovod-0.28.1-cp311.whl").touch()
    return cache / key


def test_a_wheel_for_both_frameworks_serves_torch_alone_and_not_the_other_way_round(script, tmp_path):
    torch, both = {"torch": "2.13.0"}, {"torch": "2.13.0", "tf": "2.21.0"}
    assert script.cached(tmp_path, torch, "") is None
    wider = put(tmp_path, script.cache_key(both, ""))
    assert script.cached(tmp_path, torch, "") == wider
    assert script.cached(tmp_path, torch, "NCCL") is None
    exact = put(tmp_path, script.cache_key(torch, ""))
    assert script.cached(tmp_path, torch, "") == exact
    gpus = put(tmp_path, script.cache_key(both, "NCCL"))
    assert script.cached(tmp_path, torch, "NCCL") == gpus, "and one for GPUs no torch for CPUs"
    wider.joinpath("horovod-0.28.1-cp311.whl").unlink()
    assert script.cached(tmp_path, both, "") is None, "a folder without a wheel is none"


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(2, 24, 2), (16, 24, 12), (16, 3, 1), (1, 64, 1), (4, 0, 1)]
)
def test_as_many_compilers_run_as_cores_and_memory_allow(script, cores, gigabytes, expected):
    assert script.compilers(cores, gigabytes << 30) == expected


@pytest.fixture
def source(script, monkeypatch):
    """What stands for Horovod's source, and for what compiles it; nothing is downloaded."""
    monkeypatch.setattr(script, "fetch_source", lambda into: into)
    monkeypatch.setattr(script, "apply_edits", lambda source: None)
    monkeypatch.setattr(script, "build_environment", lambda frameworks, gpu_operations: {})


def test_a_build_that_fails_leaves_nothing_that_could_be_taken_for_a_wheel(script, source, monkeypatch, tmp_path):
    def broken(source, out, log, env, lock):
        out.mkdir()
        raise script.BuildError("the build of Horovod failed")

    monkeypatch.setattr(script, "compile_wheel", broken)
    with pytest.raises(script.BuildError):
        script.build(tmp_path, [], {"torch": "2.13.0"}, "")
    assert [path.name for path in tmp_path.iterdir()] == ["build.lock"]


def test_what_a_killed_build_has_left_is_removed_by_the_next(script, source, monkeypatch, tmp_path):
    put(tmp_path, f"{script.SCRATCH}of-a-killed-one")

    def compiled(source, out, log, env, lock):
        out.mkdir()
        (out / "horovod-0.28.1-cp311.whl").touch()

    monkeypatch.setattr(script, "compile_wheel", compiled)
    made = script.build(tmp_path, [], {"torch": "2.13.0"}, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.lock", made.name]
    assert script.cached(tmp_path, {"torch": "2.13.0"}, "") == made


def test_a_full_disk_is_told_before_anything_is_fetched(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "DISK_BYTES", 1 << 60)
    with pytest.raises(script.BuildError, match=r"MB left; the build takes"):
        script.build(tmp_path, [], {"torch": "2.13.0"}, "")
