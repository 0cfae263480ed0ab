"""For all rings: what runs together, and that what a test starts can be interrupted."""

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from elasticdl.common.triton_first import import_triton
from tests.cluster.build import CONTROL_PLANE, cache_folder

import_triton()  # tests of PyTorch and of TensorFlow share a process

# How long an example takes says nothing here: the machine is shared.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_report_header() -> str | None:
    """What a first run waits for: with several processes nobody sees what each of them says."""
    if "KUBEBUILDER_ASSETS" in os.environ or CONTROL_PLANE.folder().exists():
        return None
    return (
        "kubernetes: not built yet; tests on a cluster begin with that, for 10 to 20 minutes, once "
        f"(log: {cache_folder() / 'kubernetes-build.log'})"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, with its fixtures, and so do all that share the whole cluster, which is dear to start."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "full cluster" if "full_cluster" in file else file

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell that puts the tests into the background has them ignore SIGINT, and `nohup` SIGHUP; children inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
