"""Copies of the user's values: in the memory of the last ones where it fits, and never of two places in one."""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from elastic_kit import Board, Trainee

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.training.copies import copied


def no_tensor(value, before):
    return None


@dataclass
class Opaque:
    items: list


VALUES = {
    "plain": {"best": 0.5, "name": "x", "flags": (True, None, b"y")},
    "nested": [{"rates": [0.1, 0.2]}, (np.arange(3.0), [np.ones((2, 2), np.int8)])],
    "objects": np.array([{"a": 1}], dtype=object),
    "opaque": Opaque([1, 2]),
}


def same(one, other):
    """Kinds and numbers: a representation has them all."""
    return repr(one) == repr(other)


def test_a_copy_is_the_same_and_shares_nothing_that_can_change():
    value = copy.deepcopy(VALUES)
    made = copied(value, None, no_tensor)
    assert same(made, VALUES)
    value["plain"]["best"] = 0.9
    value["nested"][0]["rates"].append(0.3)
    value["nested"][1][0][:] = 7
    value["objects"][0]["a"] = 2
    value["opaque"].items.append(3)
    assert same(made, VALUES)


def test_arrays_of_one_shape_are_copied_into_the_memory_of_the_last_copy():
    value = {"array": np.zeros(3)}
    first = copied(value, None, no_tensor)
    value["array"] += 1
    second = copied(value, first, no_tensor)
    assert second["array"] is first["array"]
    assert second["array"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("other", [np.zeros(4), np.zeros(3, np.float32), [0, 0, 0], None])
def test_what_does_not_fit_is_copied_anew(other):
    assert same(copied({"it": other}, {"it": np.ones(3)}, no_tensor), {"it": other})
    assert same(copied({"it": np.ones(3)}, {"it": other}, no_tensor), {"it": np.ones(3)})


def test_one_object_in_two_places_is_one_copy_and_two_that_were_one_are_two():
    array = np.zeros(2)
    shared = [array, array, {"again": array}]
    first = copied(shared, None, no_tensor)
    assert first[0] is first[1] is first[2]["again"]
    second = copied([np.full(2, 1.0), np.full(2, 2.0), {"again": np.full(2, 3.0)}], first, no_tensor)
    assert [second[0].tolist(), second[1].tolist(), second[2]["again"].tolist()] == [[1, 1], [2, 2], [3, 3]]


def test_what_a_module_notes_of_its_parts_is_copied_along():
    value = torch.nn.Linear(1, 1).state_dict()
    made = copied(value, None, no_tensor)
    assert type(made) is OrderedDict
    assert made._metadata == value._metadata
    assert made._metadata is not value._metadata


def kept(member):
    """Of the user's values, by name."""
    return {piece.name: piece._kept for piece in member.state.pieces if piece.is_value}


def test_an_average_of_the_weights_is_copied_in_place_however_it_is_changed():
    member = Trainee(0, Board(1), BatchPolicy(20, None, 10))
    average = torch.nn.Linear(4, 4)
    member.state.values["average"] = average
    member.state.save(SaveScope.AT_COMMIT)
    memory = kept(member)["average"]["weight"].data_ptr()
    average.weight.data.fill_(2.0)  # which no counter of versions tells
    member.state.save(SaveScope.AT_COMMIT)
    saved = kept(member)["average"]["weight"]
    assert saved.data_ptr() == memory != average.weight.data_ptr()
    assert saved.unique().tolist() == [2.0]


def test_tensors_that_share_memory_or_need_a_gradient_are_copied_as_ever():
    member = Trainee(0, Board(1), BatchPolicy(20, None, 10))
    whole = torch.arange(6.0)
    values = {
        "whole": whole,
        "part": whole[2:4],
        "leaf": torch.ones(2, requires_grad=True),
        "across": whole.view(2, 3).T,
    }
    member.state.values.update(values)
    for _ in range(2):
        member.state.save(SaveScope.AT_COMMIT)
        saved = kept(member)
        assert all(torch.equal(saved[name], value) for name, value in values.items())
        assert saved["leaf"].requires_grad
        assert not {each.data_ptr() for each in saved.values()} & {each.data_ptr() for each in values.values()}
        whole += 1
