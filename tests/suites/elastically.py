"""Runs the tests of Lightning or of transformers with their trainers trained elastically, in a world of one.

Which of them pass here with the plain trainer, and which of these pass elastically; in a checkout of theirs:

    export PYTHONPATH=~/elasticdl/tests/suites
    python -m pytest -p elastically --plainly passed.txt trainer loops      # in pytorch-lightning/tests/tests_pytorch
    python -m pytest -p elastically --elastically passed.txt trainer loops  # with --alone as without `elasticdl run`
    python -m pytest -p elastically --plainly passed.txt tests/trainer      # in transformers

A script trains once, and their tests train several times: each training is given a job of its own.
"""

import importlib
import sys
from pathlib import Path

import pytest

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit.tensors import ElasticContext


class Jobs:
    """In place of what knows the job that a process takes part in: one of this process alone for each training."""

    finish, has_returned, begun = None, False, 0

    def init(self, global_batch_size):
        self.finish, self.has_returned, self.begun = None, False, self.begun + 1
        return ElasticContext.connect(BatchPolicy(global_batch_size, None), seed=0, environ={})

    def train_in_place(self, finish):
        self.finish = finish

    def leave(self):
        self.finish = None

    def run(self, train, *args, **kwargs):
        result = train(*args, **kwargs)
        self.has_returned = True
        return result

    def end(self):
        """What the end of a script does."""
        if self.finish is not None and self.has_returned:
            self.finish()


def change_lightning(jobs, alone):
    """Where its tests leave the choice of a strategy to the trainer it is ours."""
    from elasticdl.elastic import lightning as elastic
    from elasticdl.elastic.lightning.strategy import make_strategy

    strategy = elastic.ElasticStrategy = make_strategy("lightning.pytorch", jobs)
    strategy.register_strategies(importlib.import_module("lightning.pytorch.strategies").StrategyRegistry)
    begin, strategy.takes_part_alone = strategy._begin, not alone

    def begin_anew(self, trainer):
        self._participant = None
        begin(self, trainer)

    strategy._begin = begin_anew
    trainer = importlib.import_module("lightning.pytorch").Trainer
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.accelerator_connector")
    choose, fit = connector._AcceleratorConnector._choose_strategy, trainer.fit

    def choose_ours(self):
        return "elastic" if type(chosen := choose(self)) is connector.SingleDeviceStrategy else chosen

    connector._AcceleratorConnector._choose_strategy = choose_ours
    trainer.fit = lambda self, *args, **kwargs: jobs.run(fit, self, *args, **kwargs)


def change_transformers(jobs):
    """Each trainer, whatever its class, is patched when it begins to train."""
    from transformers import Trainer

    from elasticdl.elastic.transformers import elastic_trainer

    elastic_trainer.runtime = jobs
    train = Trainer.train

    def train_elastically(self, *args, **kwargs):
        if isinstance(self, elastic_trainer.Elastic):
            self.__class__ = type(self).__mro__[2]
            vars(self.accelerator).pop("backward", None)
            vars(self.optimizer).pop("step", None)
        if type(self.args).__module__ == elastic_trainer.follow_rank.__module__:  # of this trainer or another
            self.args.__class__ = type(self.args).__mro__[1]
        elastic_trainer.patch(self)
        return jobs.run(train, self, *args, **kwargs)

    Trainer.train = train_elastically


class Plainly:
    def __init__(self, path):
        self.path, self.passed = path, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed[report.nodeid] = True
        elif not report.passed:
            self.passed.pop(report.nodeid, None)

    def pytest_sessionfinish(self):
        self.path.write_text("".join(f"{each}\n" for each in self.passed))


class Elastically:
    def __init__(self, path, jobs):
        self.chosen, self.jobs, self.training = set(path.read_text().splitlines()), jobs, 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [each for each in items if each.nodeid in self.chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        hook, before = sys.excepthook, self.jobs.begun
        try:
            yield
            self.jobs.end()
        finally:
            self.jobs.leave()
            sys.excepthook = hook
            self.training += self.jobs.begun > before

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.line(f"{self.training} of these tests train elastically")


def pytest_addoption(parser):
    group = parser.getgroup("elastically")
    group.addoption("--plainly", type=Path, metavar="FILE", help="write the ids of the tests that pass to this file")
    group.addoption("--alone", action="store_true", help="with Lightning: the strategy takes part in no job")
    group.addoption("--elastically", type=Path, metavar="FILE", help="run the tests named in this file elastically")


def pytest_configure(config):
    if path := config.getoption("--plainly"):
        config.pluginmanager.register(Plainly(path.absolute()))
    if path := config.getoption("--elastically"):
        jobs = Jobs()
        if "lightning.pytorch" in sys.modules:  # by the tests' own conftest.py
            change_lightning(jobs, alone=config.getoption("--alone"))
        if "transformers" in sys.modules:
            change_transformers(jobs)
        config.pluginmanager.register(Elastically(path.absolute(), jobs))
