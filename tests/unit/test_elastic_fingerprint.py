"""Values of a state have names, and numbers that stand for their bits, the same wherever they are computed."""

from __future__ import annotations

import dataclasses
import enum
import io
import random
import socket
import threading
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.agreement import plain_text
from elasticdl.elastic.torch_kit.pieces.marks import device_marks, marks_of
from elasticdl.elastic.training.fingerprint import (
    COLUMNS,
    array_marks,
    as_array,
    distance,
    leaves,
    mark,
    plain_mark,
    shown,
)


@dataclasses.dataclass
class Best:
    epoch: int
    scores: list


class Phase(enum.Enum):
    WARM = 1


def test_all_that_is_nested_has_a_name():
    value = {
        "optimizer": {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "best": Best(2, [deque([0.5]), Phase.WARM]),
        "count": np.int64(3),
    }
    assert leaves(value) == {
        "optimizer.state.0.step": 3,
        "optimizer.groups.0.lr": 0.1,
        "optimizer.groups.0.betas": (0.9, 0.99),
        "best.epoch": 2,
        "best.scores.0": [0.5],
        "best.scores.1": "WARM",
        "count": 3,
    }


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_are_what_they_draw(make):
    def marks(stream):
        return {
            name: mark(each) if isinstance(each, np.ndarray) else plain_mark(each)
            for name, each in leaves(stream).items()
        }

    one, other = make(3), make(3)
    assert marks({"stream": one}) == marks({"stream": other})
    other.random()
    assert marks({"stream": one}) != marks({"stream": other})


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: lambda: 0,
        threading.Thread,
        threading.Lock,
        lambda: socket.socket(),
        lambda: open("/dev/null"),  # noqa: SIM115
        io.BytesIO,
    ],
)
def test_what_each_process_has_of_its_own_is_the_same_text(make):
    one, other = make(), make()
    assert plain_text(one) == plain_text(other) == type(one).__name__
    assert "differs" not in shown(one)
    for each in (one, other):
        if hasattr(each, "close"):
            each.close()


def test_short_values_are_shown():
    assert [shown(each) for each in (0.1, 3, "a", None, [1, 2], np.array(0.25), np.ones(3), list(range(99)))] == [
        "0.1", "3", "'a'", "None", "[1, 2]", "0.25", "", "",
    ]  # fmt: skip


def test_numbers_are_numbers_and_the_rest_is_text():
    assert as_array(0.5) == 0.5
    assert as_array((0.9, 0.99)).tolist() == [0.9, 0.99]
    assert as_array("ab").tobytes() == b"'ab'"
    assert distance(as_array(1.0), as_array(1.001)) == pytest.approx(1e-3)
    assert distance(as_array("a"), as_array("b")) == float("inf")
    assert distance(as_array(3), as_array(4)) == float("inf"), "a count is not rounded"
    assert distance(as_array(float("nan")), as_array(float("nan"))) == 0.0


# -- marks --

ROWS = np.arange(COLUMNS * 8 + 5, dtype=np.int32)


def test_a_mark_is_of_each_bit_and_of_their_order():
    known = {mark(ROWS)}
    for place in (0, 1, 100, len(ROWS) - 1):
        other = ROWS.copy()
        other[place] ^= 1 << 30
        known.add(mark(other))
    for one, two in ((0, 1), (0, 2), (3, COLUMNS * 2 + 3), (0, len(ROWS) - 1)):
        swapped = ROWS.copy()
        swapped[[one, two]] = swapped[[two, one]]
        known.add(mark(swapped))
    matrix = ROWS[: 1024 * 4].reshape(4, 1024)
    known |= {mark(matrix), mark(matrix[::-1]), mark(matrix.T), mark(np.zeros(3)), mark(np.zeros(4))}
    assert len(known) == 5 + 4 + 5 - 1, "only two numbers that are exchanged within one column are not seen"


KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]
KINDS += [torch.float8_e4m3fn]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 8, COLUMNS, COLUMNS * 2 + 1, COLUMNS * 9 + 7])
def test_a_device_makes_the_same_marks(kind, size):
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(kind)
    (on_host,) = marks_of([tensor])()
    assert device_marks([tensor]).item() % 2**64 == on_host
    if kind in (torch.float32, torch.float64, torch.int64):
        assert array_marks([tensor.numpy()])() == [on_host]


def test_a_mark_does_not_depend_on_how_a_tensor_lies():
    tensor = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    lying = [tensor, tensor.to(memory_format=torch.channels_last), torch.nn.Parameter(tensor), tensor.to_sparse()]
    flat = torch.zeros(tensor.numel() + 1)
    flat[1:] = tensor.flatten()
    lying.append(flat[1:].view(tensor.shape))  # which begins in the middle of a word
    marks = [*marks_of(lying)(), *(each % 2**64 for each in device_marks(lying).tolist())]
    assert len(set(marks)) == 1


@given(st.lists(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()), max_size=4))
def test_plain_values_have_the_mark_of_their_equals(values):
    assert plain_mark(values) == plain_mark(tuple(values))
    assert plain_mark([*values, 1.5]) != plain_mark([*values, 1.25])
