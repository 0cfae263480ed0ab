"""Sending a nested state from rank 0 to all, tensors in bulk and as bytes, whatever their types."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from elasticdl.elastic.core.tensor_tree import put_tensors, take_tensors
from elasticdl.elastic.keras.collective import KerasCollective

# Tensors below the first travel together, in buffers not much above the second; larger ones without being copied first.
SMALL_BYTES = 4 << 20
BUFFER_BYTES = 64 << 20


def broadcast_state(state: Any, collective: KerasCollective) -> Any:
    """Rank 0's nested state, on every rank; tensors arrive as tensors.

    Raises:
        WorldBroken: nothing was received; the caller's own state is untouched.
    """
    if collective.world.size == 1:
        return state
    tensors: list[tf.Tensor] = []
    is_root = collective.world.rank == 0
    outline = take_tensors(state, tf.Tensor, tensors)
    specs = [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]
    sent = pickle.dumps((outline, specs)) if is_root else b""
    # Comes from another member of the same job, over the job's own connections.
    outline, specs = pickle.loads(collective.broadcast_bytes(sent, "elasticdl.outline"))
    sizes = [tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size for shape, dtype in specs]
    buffers = [
        _join([tensors[i] for i in group]) if is_root else tf.zeros([sum(sizes[i] for i in group)], tf.uint8)
        for group in _groups(sizes)
    ]
    received = collective.broadcast(buffers, "elasticdl.sync")
    if is_root:
        return state
    parts: list[tf.Tensor] = []
    for group, buffer in zip(_groups(sizes), received, strict=True):
        parts += tf.split(buffer, [sizes[i] for i in group]) if len(group) > 1 else [buffer]
    order = [i for group in _groups(sizes) for i in group]
    arrived = {i: _from_bytes(part, *specs[i]) for i, part in zip(order, parts, strict=True)}
    return put_tensors(outline, [arrived[i] for i in range(len(specs))])


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors travel together; the same on every rank."""
    groups, small, filled = [], [], 0
    for index, size in enumerate(sizes):
        if size >= SMALL_BYTES:
            groups.append([index])
            continue
        small.append(index)
        filled += size
        if filled >= BUFFER_BYTES:
            groups.append(small)
            small, filled = [], 0
    return [*groups, small] if small else groups


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    parts = [_to_bytes(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    return flat if flat.dtype == tf.uint8 else tf.reshape(tf.bitcast(flat, tf.uint8), [-1])


def _from_bytes(part: tf.Tensor, shape: tuple[int, ...], dtype: str) -> tf.Tensor:
    kind = tf.as_dtype(dtype)
    if kind == tf.bool:
        return tf.reshape(tf.cast(part, tf.bool), shape)
    if kind.size == 1:
        return tf.reshape(tf.bitcast(part, kind), shape)
    return tf.reshape(tf.bitcast(tf.reshape(part, [-1, kind.size]), kind), shape)
