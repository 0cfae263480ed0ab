"""torch.distributed's groups of one world: what they are made of, and the one by which tensors on a GPU travel, of NCCL.

Torch's own watchdog is not started, as it ends the process where we form another world: TORCH_NCCL_BLOCKING_WAIT=1 when the
group is made. `Work.wait` is not called then before the work is done, since it would look each 10 ms only.

An aborted kernel ends as if it had done its work. So whoever waits looks at this group's own mark last.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticdl.common.credentials import SHARED_GPU
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import naps
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.link.store import KvStore

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
# Ranks may be apart for as long as an evaluation takes. After this time the world is left, and the next one goes on.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class WorldStore(dist.Store):  # type: ignore[misc, name-defined]
    """The entries of one world, as torch's C++ asks for them."""

    def __init__(self, store: KvStore, version: int, scope: str) -> None:
        super().__init__()
        self.version = version
        self._store = store
        self._scope = scope

    def beside(self, scope: str) -> WorldStore:
        """The same world's entries for another group."""
        return WorldStore(self._store, self.version, scope)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.put((self._scope, key), value.encode() if isinstance(value, str) else bytes(value), self.version)

    def get(self, key: str) -> bytes:
        value = self._store.get((self._scope, key), CONNECT_SECONDS, self.version)
        if value is None:
            raise TimeoutError(f"{key} of world {self.version} has not come for {CONNECT_SECONDS:g} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def all_reduce(group: Any, tensor: torch.Tensor) -> Any:
    """In place. Returns torch's work."""
    options = dist.AllreduceOptions()
    options.timeout = COLLECTIVE_TIMEOUT
    return group.allreduce([tensor], options)


# The NCCL communicator of one world, beside its Gloo group.

GPU = "cuda"
# Aborting a communicator hangs in 2.25.1 (pytorch #149153), non-blocking calls now and then in 2.26 (#154055).
OLDEST_NCCL = (2, 27, 0)
NCCL_SECONDS = 30.0  # to connect
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


def can_use_nccl(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether tensors of this worker's GPU can travel by torch's own NCCL, which refuses two ranks on one GPU."""
    if SHARED_GPU in environ or not torch.cuda.is_available() or not dist.is_nccl_available():
        return False
    return tuple(torch.cuda.nccl.version()) >= OLDEST_NCCL  # type: ignore[no-untyped-call]


@dataclass(slots=True, eq=False)
class NcclWork:
    """A sum under way. Its tensor and ``work`` are kept until it is done: its kernel reads and writes there."""

    group: NcclGroup
    result: torch.Tensor
    work: Any  # torch's
    mark: Callable[[], bool]

    def is_completed(self) -> bool:
        """On the device, whatever came of it. Nobody asks it during an abort: it may let him wait for that, with Python's lock."""
        return not self.group.is_aborting and self.mark()

    def wait(self) -> None:
        """Raises:
        WorldBroken: the contents of the tensor are undefined.
        """
        self.group.wait(self, COLLECTIVE_TIMEOUT.total_seconds())


class NcclGroup:
    """Is aborted at the end of its world, never destroyed: that would wait for members that are gone (pytorch #180611)."""

    def __init__(
        self, store: WorldStore, group: Any, device: torch.device, mark: Callable[[Any], Callable[[], bool]]
    ) -> None:
        """``group``: torch's; nothing is connected yet. ``mark``: tells whether a work of the group is done on the device,
        without asking the communicator."""
        self._store = store  # torch keeps only its C++ half
        self._group = group
        self._device = device
        self._mark = mark
        self._name = f"world {store.version}"
        self._pending: set[NcclWork] = set()
        # Held while the communicator is asked anything: once it is being aborted, whoever asks would wait for that.
        self._asking = threading.Lock()
        self._aborted = False
        self._aborter: threading.Thread | None = None

    def connect(self, is_given_up: Callable[[], bool]) -> None:
        """Make the communicator by first sums, a small one and one as of a step, so that no step waits for it.

        Raises:
            UserError: another worker has this one's GPU.
            WorldBroken, RuntimeError: it did not come about, and is left to its end.
        """
        try:
            for elements in CONNECT_ELEMENTS:
                first = self.begin_sum(torch.zeros(elements, device=self._device))
                self.wait(first, NCCL_SECONDS, is_given_up)
        except BaseException as error:
            self.abort()
            if "Duplicate GPU" in str(error):
                raise UserError(
                    "another worker has this one's GPU, which NCCL refuses: give each its own, or set "
                    f"{SHARED_GPU}=1 for all of them: tensors travel through host memory then"
                ) from error
            raise

    def begin_sum(self, tensor: torch.Tensor) -> NcclWork:
        self._require_whole()
        work = all_reduce(self._group, tensor)
        begun = NcclWork(self, tensor, work, self._mark(work))
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
        try:
            self._group.abort()
            self._pending.clear()
        except RuntimeError as error:
            log.warning("NCCL's communicator of %s could not be aborted: %s", self._name, error)


def open_nccl(store: WorldStore, rank: int, size: int, is_given_up: Callable[[], bool]) -> NcclGroup:
    """A group that is connected. Raises as `NcclGroup.connect`."""
    device = torch.device(GPU, 0)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    group = NcclGroup(store, _make_group(store, rank, size), device, lambda work: _event_after(work, stream).query)
    group.connect(is_given_up)
    return group


def _event_after(work: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Is reached when the work is done on its device. The present stream does not wait for it."""
    with torch.cuda.stream(stream):
        # The same by two names: the second warns that it is deprecated, and older versions of torch have no other.
        (work.block_current_stream if hasattr(work, "block_current_stream") else work.synchronize)()
        event: torch.cuda.Event = stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        return event


def _make_group(store: WorldStore, rank: int, size: int) -> Any:
    # Read once per process, by all groups: calls to NCCL that take longer fail.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{NCCL_SECONDS:.0f}")
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=NCCL_SECONDS)  # after which `abort` raises, once it is over
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        return kind(store, rank, size, options)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
