"""The random streams of a process: the global generators of Python, NumPy and PyTorch, also on GPUs."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from elasticdl.elastic.torch_kit.tensors import count_gpus

Streams = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, a millisecond a step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def streams() -> Streams:
    """Their states, for this process; `RandomStreams.capture` is for others, and takes longer."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu_states()


def restore_streams(captured: Streams) -> None:
    pythons, numpys, torchs, on_gpus = captured
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)
    restore_gpu_states(on_gpus)


def gpu_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def restore_gpu_states(on_gpus: list[torch.Tensor]) -> None:
    if on_gpus:  # to count GPUs takes a quarter of a millisecond where there are none
        for device, state in enumerate(on_gpus[: count_gpus()]):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def streams_apart() -> Iterator[None]:
    """Within, the generators are anybody's; afterwards they are as before.

    Only the second of a pair of `numpy.random.randn` is forgotten, if the first was drawn before.
    """
    numpys, spare = mtrand.get_bit_generator(), _spare_generator()
    if numpys is spare:  # within another one
        before = streams()
        try:
            yield
        finally:
            restore_streams(before)
        return
    # To exchange NumPy's generator takes a microsecond, and to read and to write its state fifty.
    pythons, torchs, on_gpus = random.getstate(), torch.get_rng_state(), gpu_states()
    mtrand.set_bit_generator(spare)
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpys)
        random.setstate(pythons)
        torch.set_rng_state(torchs)
        restore_gpu_states(on_gpus)


@functools.cache
def _spare_generator() -> np.random.BitGenerator:
    return np.random.MT19937(0)


class RandomStreams:
    """The global generators of Python, NumPy and torch on the host, as one value that travels."""

    @staticmethod
    def capture() -> bytes:
        pythons, numpys, torchs, _ = streams()
        return pickle.dumps((pythons, numpys, torchs.numpy().tobytes()))

    @staticmethod
    def compared(captured: bytes) -> dict[str, Any]:
        """As `stream_parts`."""
        return stream_parts(*pickle.loads(captured))

    @staticmethod
    def restore(captured: bytes) -> None:
        pythons, numpys, torchs = pickle.loads(captured)
        restore_streams((pythons, numpys, torch.frombuffer(bytearray(torchs), dtype=torch.uint8), []))


def stream_parts(pythons: Any, numpys: Any, torchs: Any, *_: Any) -> dict[str, Any]:
    """States of the three global generators of the host as arrays, for `elasticdl.elastic.training.pieces.Piece.compared`."""
    states = {
        "python": np.array(pythons[1], np.int64),
        "numpy": np.append(numpys[1].astype(np.int64), numpys[2:4]),
        "torch": torchs if isinstance(torchs, torch.Tensor) else np.frombuffer(torchs, np.uint8),
    }
    return {"random": states}
