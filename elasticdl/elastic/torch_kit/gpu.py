"""All that is done with a GPU beside the model's own arithmetic. Nothing else in PyTorch's kit uses `torch.cuda`.

The host never waits for the device but at an event. What leaves the device goes through pinned memory, on a stream of its
own, so that the stream on which the model computes goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

GPU = "cuda"


# -- which device --


def choose_device() -> torch.device:
    """The GPU that the launcher made visible, or the CPU."""
    return torch.device(GPU, 0) if torch.cuda.is_available() else torch.device("cpu")


def count_gpus() -> int:
    """Those that this process sees."""
    return torch.cuda.device_count()


# -- random numbers, waiting --


def seed_generators(seed: int) -> None:
    """Those of the devices in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def generator_states() -> list[torch.Tensor]:
    """Of the devices in use."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def restore_generators(states: Sequence[torch.Tensor]) -> None:
    """As `generator_states` has given them, perhaps on another worker, which may see fewer devices."""
    for device, state in enumerate(states[: count_gpus()]):
        torch.cuda.set_rng_state(state, device)


def wait_for(device: torch.device) -> None:
    """Until all that the device was told to do is done."""
    if device.type == GPU:
        torch.cuda.synchronize(device)


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


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
