"""Values of a state: names, numbers that stand for their bits wherever they are computed, whose they are, and copies."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections import OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from elastic_kit import Board, Trainee
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.torch_kit.tensors import COLUMNS, marks_of
from elasticdl.elastic.training.pieces import (
    array_marks,
    as_array,
    distance,
    leaves_of,
    mapped,
    mark,
    named_leaves,
    plain_mark,
)


@dataclasses.dataclass
class BestScores:
    epoch: int
    scores: list


class Phase(enum.Enum):
    WARM = 1


def test_all_that_is_nested_has_a_name():
    value = {
        "optimizer": {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "best": BestScores(2, [deque([0.5]), Phase.WARM]),
        "count": np.int64(3),
        "seen": {"z", "x", "y"},
    }
    assert named_leaves(value) == {
        "optimizer.state.0.step": 3,
        "optimizer.groups.0.lr": 0.1,
        "optimizer.groups.0.betas": (0.9, 0.99),
        "best.epoch": 2,
        "best.scores.0": [0.5],
        "best.scores.1": "WARM",
        "count": 3,
        "seen": ["'x'", "'y'", "'z'"],
    }


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_are_what_they_draw(make):
    def marks(stream):
        return {
            name: mark(each) if isinstance(each, np.ndarray) else plain_mark(each)
            for name, each in named_leaves(stream).items()
        }

    one, other = make(3), make(3)
    assert marks({"stream": one}) == marks({"stream": other})
    other.random()
    assert marks({"stream": one}) != marks({"stream": other})


# -- marks --

ROWS = np.arange(COLUMNS * 8 + 5, dtype=np.int32)


def test_numbers_are_numbers_and_the_rest_is_text():
    assert as_array(0.5) == 0.5
    assert as_array((0.9, 0.99)).tolist() == [0.9, 0.99]
    assert as_array("ab").tobytes() == b"'ab'"
    assert distance(as_array(1.0), as_array(1.001)) == pytest.approx(1e-3)
    assert distance(as_array("a"), as_array("b")) == float("inf")
    assert distance(as_array(3), as_array(4)) == float("inf"), "a count is not rounded"
    assert distance(as_array(float("nan")), as_array(float("nan"))) == 0.0


@pytest.mark.parametrize("marks", [array_marks, lambda arrays: marks_of([torch.tensor(each) for each in arrays])])
def test_a_mark_is_of_each_bit_and_of_their_order(marks):
    arrays = [ROWS]
    for place in (0, 1, 100, len(ROWS) - 1):
        arrays.append(other := ROWS.copy())
        other[place] ^= 1 << 30
    for one, two in ((0, 1), (0, 2), (0, len(ROWS) - 1)):
        arrays.append(swapped := ROWS.copy())
        swapped[[one, two]] = swapped[[two, one]]
    matrix = ROWS[: 1024 * 4].reshape(4, 1024)
    arrays += [matrix, matrix[::-1].copy(), matrix.T, np.zeros(3), np.zeros(4)]
    assert len(set(marks(arrays)())) == len(arrays)


# Of one, two, four and eight bytes.
KINDS = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tensors_of_all_kinds_and_sizes_have_marks(kind):
    for size in (0, 1, 3, 8, COLUMNS, COLUMNS * 2 + 1, COLUMNS * 9 + 7):
        tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(kind)
        one, same, longer = marks_of([tensor, tensor.clone(), torch.cat([tensor, tensor.new_ones(1)])])()
        assert one == same != longer


def test_a_mark_does_not_depend_on_how_a_tensor_lies():
    tensor = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    lying = [tensor, tensor.to(memory_format=torch.channels_last), torch.nn.Parameter(tensor), tensor.to_sparse()]
    flat = torch.zeros(tensor.numel() + 1)
    flat[1:] = tensor.flatten()
    lying.append(flat[1:].view(tensor.shape))  # which begins in the middle of a word
    assert len(set(marks_of(lying)())) == 1


@given(st.lists(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()), max_size=4))
def test_plain_values_have_the_mark_of_their_equals(values):
    assert plain_mark(values) == plain_mark(tuple(values))
    assert plain_mark([*values, 1.5]) != plain_mark([*values, 1.25])


Pair = namedtuple("Pair", "one other")


def test_each_leaf_is_replaced_and_collections_keep_their_kinds():
    value = {"a": [1, (2, Pair(3, OrderedDict(b=4)))], "c": None}
    doubled = mapped(lambda leaf: leaf and 2 * leaf, value)
    assert doubled == {"a": [2, (4, Pair(6, {"b": 8}))], "c": None}
    assert type(doubled["a"][1][1]) is Pair
    assert list(leaves_of(value)) == [1, 2, 3, 4, None]


def test_values_are_copied_however_they_change_and_whatever_memory_they_share():
    member = Trainee(0, Board(1), BatchPolicy(20, None, 10))
    average, whole = torch.nn.Linear(4, 4), torch.arange(6.0)
    values = {"part": whole[2:4], "leaf": torch.ones(2, requires_grad=True), "across": whole.view(2, 3).T}
    member.state.values.update(values, average=average)
    for number in range(2):
        average.weight.data.fill_(number)  # which no counter of versions tells
        member.state.save(SaveScope.AT_COMMIT)
        saved = {piece.name: piece._kept for piece in member.state.pieces if piece.is_value}
        kept = saved.pop("average")["weight"]
        assert (kept.unique().tolist(), kept.data_ptr() == average.weight.data_ptr()) == ([number], False)
        assert all(torch.equal(saved[name], value) for name, value in values.items())
        assert saved["leaf"].requires_grad
        assert not {each.data_ptr() for each in saved.values()} & {each.data_ptr() for each in values.values()}
        whole += 1
