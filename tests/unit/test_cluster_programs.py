"""Where the test cluster's programs come from, and what is said when they can't."""

import contextlib
import os
import shutil
import signal
import stat
import sys

import pytest

from tests.cluster import __main__ as main
from tests.cluster import build, debian
from tests.cluster.build import NAMES, find_programs
from tests.cluster.steps import Unavailable


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_programs(folder, version="Kubernetes v1.37.2"):
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(f"#!/bin/sh\necho '{version}'\n")
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def test_a_machine_without_apt_is_told_so(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt-get is not found"):
        build.require([build.PROMETHEUS])


@pytest.mark.skipif(not debian.KEYRING.exists() or shutil.which("apt-get") is None, reason="not a Debian")
def test_an_archive_that_cannot_be_reached_is_named_with_the_reason(empty_cache, monkeypatch):
    monkeypatch.setenv("ELASTICDL_DEBIAN_MIRROR", "http://127.0.0.1:9/debian")
    with pytest.raises(Unavailable, match="archive does not give the packages"):
        build.require([build.PROMETHEUS])


def test_what_is_in_the_cache_is_not_built_again(empty_cache):
    folder = make_programs(build.CLUSTER.folder())
    assert find_programs(lambda line: pytest.fail(line)) == folder


def test_given_programs_must_be_complete_and_of_a_release_that_is_known(tmp_path, monkeypatch):
    folder = make_programs(tmp_path / "bin", "Kubernetes v1.31.2")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    assert find_programs() == folder
    (folder / "kube-apiserver").write_text("")
    with pytest.raises(Unavailable, match=r"kube-apiserver does not tell its version: .*Exec format error"):
        find_programs()
    (folder / "kube-scheduler").unlink()
    with pytest.raises(Unavailable, match=r"KUBEBUILDER_ASSETS: .* lacks kube-scheduler"):
        find_programs()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(make_programs(tmp_path / "old", "Kubernetes v1.20.2")))
    with pytest.raises(Unavailable, match=r"says 'Kubernetes v1\.20\.2', and 1.26 or newer is needed"):
        find_programs()


def test_a_cluster_that_was_started_in_the_background_ends_with_sigint(monkeypatch):
    """A shell has what it starts with & ignore that signal."""

    class Interrupted(contextlib.nullcontext):
        kubeconfig = image = logs = ""

        def __enter__(self):
            return self

        def check(self):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the signal changed nothing")

    before = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(sys, "argv", ["tests.cluster"])
    monkeypatch.setattr(main, "_cluster", lambda options: Interrupted())
    monkeypatch.setattr(main, "_CHECK_EACH_S", 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main.main() == 0
    finally:
        for number, handler in before:
            signal.signal(number, handler)
