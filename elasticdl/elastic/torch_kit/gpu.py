"""All that is done with a GPU beside the model's own arithmetic. Nothing else here or in the worker uses `torch.cuda`.

The host never waits for the device but at an event. What leaves the device goes through pinned memory, on a stream of its
own, so that the stream on which the model computes goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elasticdl.common.environment import SHARED_GPU
from elasticdl.elastic.collectives.port import Bytes

GPU = "cuda"
# Aborting a communicator hangs in 2.25.1 (pytorch #149153), non-blocking calls now and then in 2.26 (#154055).
OLDEST_NCCL = (2, 27, 0)


# -- which device --


def choose_device() -> torch.device:
    """The GPU that the launcher made visible, or the CPU."""
    return torch.device(GPU, 0) if torch.cuda.is_available() else torch.device("cpu")


def count_gpus() -> int:
    """Those that this process sees."""
    return torch.cuda.device_count()


def can_use_nccl(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether tensors of this worker's GPU can travel by torch's own NCCL, which refuses two ranks on one GPU."""
    if SHARED_GPU in environ or choose_device().type != GPU or not dist.is_nccl_available():
        return False
    return tuple(torch.cuda.nccl.version()) >= OLDEST_NCCL  # type: ignore[no-untyped-call]


# -- random numbers, waiting --


def seed_generators(seed: int) -> None:
    """Those of the devices in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def wait_for(device: torch.device) -> None:
    """Until all that the device was told to do is done."""
    if device.type == GPU:
        torch.cuda.synchronize(device)


def reached(device: torch.device) -> None:
    """Until what the present stream was told so far is done."""
    if device.type == GPU:
        event = torch.cuda.current_stream(device).record_event(_new_event())
        event.synchronize()


class PassTimer:
    """How long the passes of a step take by the device's clock. On a CPU, which has none of its own: 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = None  # events

    def begin(self) -> None:
        self._begin, self._end = self._mark(), None

    def end(self) -> None:
        """All passes were handed to the device."""
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        """0 if the device is not through yet: it is not waited for."""
        if self._begin is None or self._end is None or not self._end.query():
            return 0.0
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != GPU:
            return None
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


# -- from the device to the host --


def pinned_bytes(size: int, device: torch.device) -> Bytes:
    """Host memory that ``device`` copies to without a detour; plain memory for a CPU."""
    if device.type != GPU:
        return np.empty(size, np.uint8)
    made: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return made


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def event_after(work: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Is reached when ``work``, a collective of torch's, is done on its device. The present stream does not wait for it."""
    with torch.cuda.stream(stream):
        work.synchronize()
        event: torch.cuda.Event = stream.record_event(_new_event())
        return event


class HostCopy:
    """A tensor's contents on their way to the host: on a GPU through pinned memory and ``stream``, while the host goes on.

    It keeps the tensor: its memory must not be used for another while it is read.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """``stream``: None for the present one, behind which the copy is made then."""
        self._source, self._event = tensor, None
        if tensor.device.type != GPU:
            self.host = tensor.to("cpu", copy=True)
            return
        present = torch.cuda.current_stream(tensor.device)
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = stream or present
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
            self._event = stream.record_event(_new_event())

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """What the tensor held when the copy was begun."""
        if self._event is not None:
            self._event.synchronize()
        return self.host


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else who waits for it spins
