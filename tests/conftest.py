"""For all rings: what runs together and in which order, what takes longer than it should, and that a test can be interrupted."""

import gc
import os
import signal
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

from elasticdl.triton_first import import_triton
from tests.cluster.session import pytest_report_header, pytest_terminal_summary  # noqa: F401

# What is tested is meant for the CPU, where several workers can be. Tests that need a GPU have their jobs see it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import_triton()  # tests of PyTorch and of TensorFlow share a process

# How long an example takes says nothing here: the machine is shared.
for _profile, _examples in (("quick", 25), ("thorough", 150)):
    settings.register_profile(
        _profile, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )

# Seconds that one test may take on two idle cores, by its ring; what takes longer is listed, and no failure.
BUDGETS = {"tests/e2e": 20.0, "tests/contract": 10.0, "tests/simulation": 10.0, "tests/unit": 1.0}
CLUSTERS = {"cluster", "full_cluster"}  # fixtures
SECONDS = "elasticdl/seconds"  # in pytest's cache: how long each file took when it was last run


class Times:
    """How long tests took: of the process that prints, which hears of all of them."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache: pytest.Cache | None = getattr(config, "cache", None)
        self._files: dict[str, float] = defaultdict(float)
        self._over: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.location[0]] += report.duration
        if report.when == "call" and report.duration > _budget(report.nodeid):
            self._over.append((report.duration, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._cache is not None:
            self._cache.set(SECONDS, {**self._cache.get(SECONDS, {}), **self._files})
        if not self._over:
            return
        rings = ", ".join(f"{ring.rpartition('/')[2]} {seconds:.0f} s" for ring, seconds in BUDGETS.items())
        terminalreporter.section(f"{len(self._over)} tests took longer than two idle cores should need ({rings})")
        for seconds, test in sorted(self._over, reverse=True):
            terminalreporter.write_line(f"{seconds:7.1f} s  {test}")


def _budget(test: str) -> float:
    return next((seconds for ring, seconds in BUDGETS.items() if test.startswith(ring)), BUDGETS["tests/unit"])


def pytest_configure(config: pytest.Config) -> None:
    # `make test`, which leaves out what is slow, tries fewer of the examples that hypothesis makes up.
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole jobs first, as what is short fills the gaps at the end, and in each ring the file that took longest. What needs a
    cluster comes last: its programs may be in the making until then. Each file's own order stays."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    seconds: dict[str, float] = cache.get(SECONDS, {}) if cache else {}
    clusters = {item.location[0] for item in items if CLUSTERS & set(getattr(item, "fixturenames", ()))}

    def place(item: pytest.Item) -> tuple[bool, float, float]:
        file = item.location[0]
        return file in clusters, -_budget(item.nodeid), -seconds.get(file, 0.0)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What all the imports have left is not searched for garbage again and again: it takes longer than many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell that puts the tests into the background has them ignore SIGINT, and `nohup` SIGHUP; children inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
