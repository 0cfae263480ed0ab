"""Sending a nested state from rank 0 to all, whatever the framework.

Tensors travel as bytes, through host memory and one buffer of bounded size: a device that is nearly full has no room for
a second state. Only members that need the state keep what arrives, on the host until all of it is there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from elasticdl.elastic.collectives.port import Bytes, Collective, memory_of_the_worker

PIECE_BYTES = 16 << 20  # smaller ones take more rounds, larger ones leave the processor's cache


def broadcast_state(
    state: dict[str, Any], collective: Collective, *, on_host: Collection[str] = (), to_all: bool = False
) -> dict[str, Any]:
    """Rank 0's nested state, on every member that does not stand with it, or ``to_all``; on the others their own.

    ``on_host``: the parts of the state whose tensors need not arrive on a device.

    Raises:
        WorldBroken: nothing was received; the caller's own state is untouched.
        ShortOfMemoryError: the host has no room for it.
    """
    world = collective.world
    if world.size == 1:
        return state
    receivers = [rank for rank in range(world.size) if to_all or not world.stands_with_root(rank)]
    with memory_of_the_worker("the training state"):
        if world.rank == 0:
            _send(state, collective, on_host, receivers)
            return state
        received = _receive(collective, receivers)
        return state if received is None else received


def _send(state: dict[str, Any], collective: Collective, on_host: Collection[str], receivers: Sequence[int]) -> None:
    adapter = collective.tensors
    tensors: list[Any] = []
    parts: dict[str, bytes] = {}
    are_on_host: list[bool] = []  # of each tensor
    for name, part in state.items():
        parts[name] = without_tensors(part, adapter.kind, tensors)
        are_on_host += [name in on_host] * (len(tensors) - len(are_on_host))
    sizes = [adapter.size(tensor) for tensor in tensors]
    descriptions = [
        adapter.describe(tensor, on_host=is_on_host) for tensor, is_on_host in zip(tensors, are_on_host, strict=True)
    ]
    collective.broadcast_bytes(pickle.dumps((parts, sizes, descriptions)), "elasticdl.tensor_tree")
    buffer = np.empty(min(sum(sizes), PIECE_BYTES), np.uint8)
    present, content = -1, None  # the tensor whose bytes are at hand
    for piece in _pieces(sizes):
        for index, cut, place in piece:
            if present != index:
                present, content = index, adapter.to_bytes(tensors[index])
            buffer[place] = adapter.read(content, cut)
        _move(buffer[: piece[-1][2].stop], collective, receivers)


def _receive(collective: Collective, receivers: Sequence[int]) -> dict[str, Any] | None:
    keep = collective.world.rank in receivers
    # Comes from another member of the same job, over the job's own connections.
    parts, sizes, descriptions = pickle.loads(collective.broadcast_bytes(b"", "elasticdl.tensor_tree"))
    buffer = np.empty(min(sum(sizes), PIECE_BYTES), np.uint8)
    contents = [np.empty(size, np.uint8) for size in sizes if keep]
    for piece in _pieces(sizes):
        received = _move(buffer[: piece[-1][2].stop], collective, receivers)
        for index, cut, place in piece:
            if keep:
                contents[index][cut] = received[place]
    if not keep:
        return None
    tensors = [collective.tensors.from_bytes(*each) for each in zip(contents, descriptions, strict=True)]
    return {name: with_tensors(part, tensors) for name, part in parts.items()}


def _move(array: Bytes, collective: Collective, receivers: Sequence[int]) -> Bytes:
    """Rank 0's array to those who need it; one newcomer is the common case, and spares the others the traffic."""
    if len(receivers) == 1:
        return collective.send_array(array, receivers[0], "elasticdl.sync")
    return collective.broadcast_array(array, "elasticdl.sync")


def _pieces(sizes: Sequence[int]) -> Iterator[list[tuple[int, slice, slice]]]:
    """What travels at once: of which tensors which bytes, and their places in the buffer; the same on every rank."""
    piece: list[tuple[int, slice, slice]] = []
    filled = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            taken = min(size - start, PIECE_BYTES - filled)
            piece.append((index, slice(start, start + taken), slice(filled, filled + taken)))
            start, filled = start + taken, filled + taken
            if filled == PIECE_BYTES:
                yield piece
                piece, filled = [], 0
    if piece:
        yield piece


class _Pickler(pickle.Pickler):
    """Has of a tensor its number alone, and puts it into a list."""

    def __init__(self, file: io.BytesIO, kind: type, tensors: list[Any]) -> None:
        super().__init__(file)
        self._kind, self._tensors = kind, tensors

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, self._kind):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def without_tensors(value: Any, kind: type, tensors: list[Any]) -> bytes:
    """The nested value as bytes, but for its tensors (instances of ``kind``), which are appended to the list."""
    file = io.BytesIO()
    _Pickler(file, kind, tensors).dump(value)
    return file.getvalue()


def with_tensors(content: bytes, tensors: Sequence[Any]) -> Any:
    """The inverse of `without_tensors`."""
    return _Unpickler(content, tensors).load()
