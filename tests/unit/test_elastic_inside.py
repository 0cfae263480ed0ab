"""Two workers of two processes: each process meets its equals, and what fails in one process fails in all of its worker."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elasticdl.common.credentials import Processes
from elasticdl.elastic.collectives.torch_inside import TorchOfSeveral
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, KvStore
from elasticdl.elastic.torch_kit.tensors import TorchTensors

ALL = [(worker, number) for worker in range(2) for number in range(2)]
MEMBERS = [Member(worker_id=worker, host="127.0.0.1", step=0, has_state=False) for worker in range(2)]


class Four:
    """Each in a thread; what one process publishes its equal hears, as a master would have it."""

    def __init__(self, folder):
        self._threads = ThreadPoolExecutor(4)
        self._stores = {}
        for worker, number in ALL:
            self._stores[worker, number] = KvStore(
                lambda world, key, value, to=(1 - worker, number): self._stores[to].receive(world, key, value)
            )
        self.made = {}
        made = self.each(lambda worker, number: self._make(folder, worker, number))
        self.made.update(zip(ALL, made, strict=True))

    def _make(self, folder, worker, number):
        processes = Processes(number, 2, str(folder / f"meeting-{worker}"))
        return TorchOfSeveral(TorchTensors(), Endpoint(self._stores[worker, number], "lo", processes))

    def each(self, work):
        """What each does, or the error by which it fails."""

        def tried(who):
            try:
                return work(*who)
            except WorldBroken as error:
                return error

        return list(self._threads.map(tried, ALL, timeout=60))

    def enter(self, version):
        def start(worker, number):
            self._stores[worker, number].open_world(version)
            self.made[worker, number].start(World.of(version, MEMBERS, worker))

        return self.each(start)

    def break_world(self, version):
        for who in ALL:
            self._stores[who].break_world(version)
            self.made[who].break_world(version)

    def sum(self):
        def work(worker, number):
            transfer = self.made[worker, number].begin_sum(torch.tensor([10.0 * worker + number]), "sum")
            return self.made[worker, number].finish([transfer])[0].item()

        return self.each(work)

    def close(self):
        self.each(lambda worker, number: self.made[worker, number].stop())
        self._threads.shutdown()


@pytest.fixture
def four(tmp_path):
    made = Four(tmp_path)
    yield made
    made.close()


def test_each_process_meets_its_equals(four):
    assert four.enter(1) == [None] * 4
    assert four.sum() == [10, 12, 10, 12]
    assert four.each(lambda worker, number: four.made[worker, number].inside.sum([1.0, number])) == [[2.0, 1.0]] * 4
    told = four.each(lambda worker, number: four.made[worker, number].broadcast_bytes(b"%d" % worker, "told"))
    assert told == [b"0"] * 4


def test_a_process_that_can_not_begin_says_so_behind_the_sum_and_takes_its_worker_along(four, monkeypatch):
    """Its sibling had its sum; that of the other worker waits until the world is broken."""
    four.enter(1)

    def fails(lent, name):
        four.break_world(1)
        raise RuntimeError("gloo: connection closed by peer")

    monkeypatch.setattr(four.made[0, 0], "_begin_sum", fails)
    assert [type(each) for each in four.sum()] == [WorldBroken] * 4
    monkeypatch.undo()
    four.each(lambda worker, number: four.made[worker, number].stop())
    assert four.enter(2) == [None] * 4
    assert four.sum() == [10, 12, 10, 12]


def test_a_world_that_one_process_can_not_enter_no_process_of_its_worker_is_in(four, monkeypatch):
    def fails(*_, **__):
        raise WorldBroken("could not be connected")

    monkeypatch.setattr(four.made[0, 1], "_connect", fails)
    threading.Timer(1.0, four.break_world, (1,)).start()  # as the master does for those that wait for its equal
    assert [type(each) for each in four.enter(1)] == [WorldBroken] * 4
