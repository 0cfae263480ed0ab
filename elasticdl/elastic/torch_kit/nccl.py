"""The NCCL communicator of one world, beside its Gloo group: tensors on a GPU travel by it.

Torch's own watchdog is not started, as it ends the process where we form another world: TORCH_NCCL_BLOCKING_WAIT=1 when the
group is made. `Work.wait` is not called then before the work is done, since it would look each 10 ms only.

An aborted kernel ends as if it had done its work. So whoever waits looks at this group's own mark last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticdl.common.environment import SHARED_GPU
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.torch_distributed import WorldStore, all_reduce, broadcast
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.torch_kit.gpu import choose_device, event_after, new_stream
from elasticdl.elastic.torch_kit.polling import naps

log = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
COLLECTIVE_SECONDS = 1800.0  # ranks may be apart for as long as an evaluation takes
ABORT_SECONDS = 5.0  # that a world's end waits for its memory on the device; then it goes on without
MARK_SECONDS = 1.0  # from the end of a work to its mark, which is on another stream, and may stand behind other kernels
# NCCL connects for an algorithm when it is first used, which depends on the size: elements of the sums that do it before.
CONNECT_ELEMENTS = (1, 1 << 20)

# For the constructor alone; what the user's own groups do is the user's.
SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # Of versions that start the watchdog all the same:
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


@dataclass(slots=True, eq=False)
class NcclWork:
    """A collective under way. ``tensor`` and ``work`` are kept until it is done: its kernel writes there."""

    group: NcclGroup
    tensor: torch.Tensor
    work: Any  # torch's
    mark: Callable[[], bool]

    def is_completed(self) -> bool:
        """On the device, whatever came of it. Nobody asks it during an abort: it may let him wait for that, with Python's lock."""
        return not self.group.is_aborting and self.mark()

    def wait(self) -> None:
        """Raises:
        WorldBroken: the contents of the tensor are undefined.
        """
        self.group.wait(self, COLLECTIVE_SECONDS)


@dataclass(slots=True)
class NcclLibrary:
    """What of torch a group is made with; tests give others."""

    make_group: Callable[[Any, int, int, torch.device], Any]
    # What tells whether a work is done on the device, without asking the communicator.
    mark: Callable[[Any], Callable[[], bool]]


def torch_library(device: torch.device) -> NcclLibrary:
    stream = new_stream(device)
    return NcclLibrary(_make_group, lambda work: event_after(work, stream).query)


class NcclGroup:
    """Is aborted at the end of its world, never destroyed: that would wait for members that are gone (pytorch #180611)."""

    def __init__(self, store: WorldStore, rank: int, size: int, device: torch.device, library: NcclLibrary) -> None:
        """Nothing is connected yet; see `connect`."""
        self._store = store  # torch keeps only its C++ half
        self._device = device
        self._library = library
        self._name = f"world {store.version}"
        self._pending: set[NcclWork] = set()
        # Held while the communicator is asked anything: once it is being aborted, whoever asks would wait for that.
        self._asking = threading.Lock()
        self._aborted = False
        self._aborter: threading.Thread | None = None
        self._group = library.make_group(store, rank, size, device)

    def connect(self, is_given_up: Callable[[], bool]) -> None:
        """Make the communicator by first sums, a small one and one as of a step, so that no step waits for it.

        Raises:
            WorldBroken, RuntimeError: it did not come about.
        """
        for elements in CONNECT_ELEMENTS:
            self.wait(self.begin_sum(torch.zeros(elements, device=self._device)), CONNECT_SECONDS, is_given_up)

    def begin_sum(self, tensor: torch.Tensor) -> NcclWork:
        return self._begin(tensor, all_reduce)

    def begin_broadcast(self, tensor: torch.Tensor) -> NcclWork:
        return self._begin(tensor, broadcast)

    def _begin(self, tensor: torch.Tensor, begin: Callable[[Any, torch.Tensor], Any]) -> NcclWork:
        self._require_whole()
        work = begin(self._group, tensor)
        begun = NcclWork(self, tensor, work, self._library.mark(work))
        self._pending.add(begun)
        return begun

    def wait(self, begun: NcclWork, seconds: float, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Raises:
        WorldBroken: the group was aborted, NCCL has failed, it took too long or is no longer wanted.
        """
        ended: float | None = None
        for waited in naps():
            self._require_whole()
            if begun.is_completed():
                break
            with self._asking:
                self._require_whole()
                if ended is None and begun.work.is_completed():  # also by an error
                    ended = waited
            if ended is not None and waited - ended > MARK_SECONDS:
                raise WorldBroken(f"NCCL has lost a member of {self._name}")
            if waited > seconds or is_given_up():
                raise WorldBroken(f"a collective of {self._name} is not done after {waited:.1f} s")
        self._require_whole()  # else it would wait for the abort
        begun.work.wait()  # raises what NCCL has found out meanwhile
        self._require_whole()
        self._pending.discard(begun)  # an abort may have done so just now

    def _require_whole(self) -> None:
        if self._aborted:
            raise WorldBroken(f"{self._name} is broken")

    @property
    def is_aborting(self) -> bool:
        return self._aborted and (self._aborter is None or self._aborter.is_alive())

    def abort(self) -> None:
        """From any thread, which does not wait for it."""
        with self._asking:
            if self._aborted:
                return
            self._aborted = True
            self._aborter = threading.Thread(target=self._abort, name="elasticdl-nccl-abort", daemon=True)
            self._aborter.start()  # here, as `close` waits for it

    def close(self) -> None:
        """Abort, and wait a little until the memory on the device is free."""
        self.abort()
        if self._aborter is not None:
            self._aborter.join(ABORT_SECONDS)
            if self._aborter.is_alive():
                log.warning("NCCL's communicator of %s is still being aborted", self._name)

    def _abort(self) -> None:
        # The thread keeps the group and what its kernels write to, until they have ended.
        began = time.monotonic()
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("NCCL's communicator of %s could not be aborted: %s", self._name, error)
            return
        self._pending.clear()
        log.debug("aborted NCCL's communicator of %s in %.2f s", self._name, time.monotonic() - began)


def open_group(store: WorldStore, rank: int, size: int, is_given_up: Callable[[], bool]) -> NcclGroup:
    """For `elasticdl.elastic.collectives.torch_distributed`: connected, or left to its end.

    Raises:
        UserError: another worker has this one's GPU.
        WorldBroken, RuntimeError: it did not come about.
    """
    device = choose_device()
    return connected(NcclGroup(store, rank, size, device, torch_library(device)), is_given_up)


def connected(group: NcclGroup, is_given_up: Callable[[], bool]) -> NcclGroup:
    try:
        group.connect(is_given_up)
    except BaseException as error:
        group.abort()
        if "Duplicate GPU" in str(error):
            raise UserError(
                "another worker has this one's GPU, which NCCL refuses: give each its own, or set "
                f"{SHARED_GPU}=1 for all of them: tensors travel through host memory then"
            ) from error
        raise
    return group


def _make_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    # Read once per process, by all groups: calls to NCCL that take longer fail.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{CONNECT_SECONDS:.0f}")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=CONNECT_SECONDS)  # after which `abort` raises, once it is over
    with _environment():
        return kind(store, rank, size, options)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
