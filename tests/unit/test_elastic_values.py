"""Values of a state and of attributes: they travel as what they are, are undone and copied, and have numbers that stand for their bits."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import io
import operator
import random
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from elastic_kit import Board, Trainee, in_threads
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.torch_kit.tensors import COLUMNS, marks_of
from elasticdl.elastic.torch_kit.torch_state import TENSORS
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import Attributes, Holder, is_scripts_own
from elasticdl.elastic.training.pieces import array_marks, as_array, distance, mark, named_leaves, plain_mark

# -- marks: numbers that stand for bits --


@dataclasses.dataclass
class Best:
    epoch: int
    scores: list


class Level(enum.IntEnum):
    LOW = 1


def test_all_that_is_nested_has_a_name():
    value = {
        "optimizer": {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "best": Best(2, [deque([0.5]), Level.LOW]),
        "count": np.int64(3),
        "seen": {"z", "x", "y"},
    }
    assert named_leaves(value) == {
        "optimizer.state.0.step": 3,
        "optimizer.groups.0.lr": 0.1,
        "optimizer.groups.0.betas": (0.9, 0.99),
        "best.epoch": 2,
        "best.scores.0": [0.5],
        "best.scores.1": "LOW",
        "count": 3,
        "seen": ["'x'", "'y'", "'z'"],
    }


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_are_what_they_draw(make):
    def marks(stream):
        leaves = named_leaves({"stream": stream}).items()
        return [(name, mark(each) if isinstance(each, np.ndarray) else plain_mark(each)) for name, each in leaves]

    one, other = make(3), make(3)
    assert marks(one) == marks(other)
    other.random()
    assert marks(one) != marks(other)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [(1.0, 1.001, 1e-3), ("a", "b", np.inf), (3, 4, np.inf), (np.nan, np.nan, 0.0), ((0.9, 0.99), [0.9, 0.99], 0.0)],
)
def test_numbers_are_some_way_apart_but_counts_and_texts_are_not_rounded(one, other, apart):
    assert distance(as_array(one), as_array(other)) == pytest.approx(apart)


ROWS = np.arange(COLUMNS * 8 + 5, dtype=np.int32)


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
    flat = torch.zeros(tensor.numel() + 1)
    flat[1:] = tensor.flatten()
    shifted = flat[1:].view(tensor.shape)  # begins in the middle of a word
    lying = [
        tensor,
        tensor.to(memory_format=torch.channels_last),
        torch.nn.Parameter(tensor),
        tensor.to_sparse(),
        shifted,
    ]
    assert len(set(marks_of(lying)())) == 1


@given(st.lists(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()), max_size=4))
def test_plain_values_have_the_mark_of_their_equals(values):
    assert plain_mark(values) == plain_mark(tuple(values))
    assert plain_mark([*values, 1.5]) != plain_mark([*values, 1.25])


# -- values travel, and are copied --

TRAVELS = [
    *(None, True, 7, 0.1, float("nan"), 2j, "a", b"a", Path("a/b"), frozenset({1}), {"a"}),
    *([1, [2.5]], (1, ("a",)), [], {1: {(2, "b"): 3}}, {None: b"", "": []}, {"__kind__": "set", "parts": [1]}),
    *({"__tuple__": [1]}, deque([1, 2], 3), deque(), OrderedDict(b=(1,), a=2), Counter(a=2)),
    *(defaultdict(None, a=1), defaultdict(list, {0: [{1}]}), defaultdict(int, a={"b": deque([None])})),
]


@pytest.mark.parametrize("value", TRAVELS, ids=repr)
def test_values_travel_as_what_they_are(value):
    assert plain_data.is_plain(value)
    plain_data.write(value, file := io.BytesIO())
    back = plain_data.read(io.BytesIO(file.getvalue()))
    assert (type(back), repr(back)) == (type(value), repr(value))
    assert plain_data.checksum(back) == plain_data.checksum(value)


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", "first second")
OTHERS = [Best(0, []), Level.LOW, Pair(1, 2), Text("a"), object(), np.array([object()]), defaultdict(lambda: 1)]


@pytest.mark.parametrize("value", [*OTHERS, {"a": [object()]}, np.ma.masked_array([1]), np.zeros(1, [("a", "f4")])])
def test_what_would_come_back_as_something_else_is_not_plain(value):
    assert not plain_data.is_plain(value)


def test_an_outline_that_another_version_has_written_is_no_dict():
    with pytest.raises(ValueError, match="another version"):
        plain_data.put_together({"betas": {"__tuple__": [0.9, 0.999]}}, {})


def test_arrays_are_read_in_many_threads():
    """CPython 3.11 lets them break each other off, and does so often if it collects garbage."""
    plain_data.write([np.float32(3), np.arange(3)], file := io.BytesIO())

    def read(_):
        return [int(plain_data.read(io.BytesIO(file.getvalue()))[1].sum()) for _ in range(100)]

    def give_way(*_):
        time.sleep(0)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(7, 2, 2)
    gc.callbacks.append(give_way)
    try:
        assert in_threads(read, range(5)) == [[3] * 100] * 5
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def test_values_are_copied_however_they_change_and_whatever_memory_they_share():
    member = Trainee(0, Board(1), BatchPolicy(20, None, 10))
    average, whole = torch.nn.Linear(4, 4), torch.arange(6.0)
    values = {"part": whole[2:4], "leaf": torch.ones(2, requires_grad=True), "across": whole.view(2, 3).T}
    member.state.values.update(values, average=average, pair=Pair(1, OrderedDict(a=[2])))
    for number in range(2):
        average.weight.data.fill_(number)  # which no counter of versions tells
        member.state.save(SaveScope.AT_COMMIT)
        saved = {name: member.state.values[name].detach().clone() for name in values}
        average.weight.data.fill_(7)
        whole += 1
        member.state.restore()
        assert average.weight.unique().tolist() == [number]
        assert all(torch.equal(saved[name], member.state.values[name]) for name in values)
        assert member.state.pair == Pair(1, OrderedDict(a=[2]))


# -- in attributes of what is the script's own --


class Keeps:
    def __init__(self):
        self.number, self.text, self.flag, self.folder = 1, "a", False, "/mine"
        self.seen, self.by, self.rows = [1], {"a": (1,)}, np.zeros(2)
        self.held = Counter(a=1), OrderedDict(a=1), {1}, deque([1])
        self.average, self.large = torch.zeros(2), torch.zeros(5000)

    def go_on(self):
        self.number, self.text, self.flag = 2, "b", True
        self.seen.append(2)
        for each in self.held:
            each.pop() if isinstance(each, set | deque) else each.update(b=2)
        self.by["b"] = {3}
        self.rows += 1
        self.average += 1
        self.large += 1
        self.later = 7


def attributes_of(kept, told=pytest.fail):
    made = Attributes(lambda: [Holder("one", "the callback Keeps", kept)], TENSORS, told)
    made.begin()
    return made


def text_of(kept):
    return str({**vars(kept), "large": float(kept.large[0])})


def test_what_has_changed_is_sent_and_what_has_not_stays():
    first, newcomer, third = Keeps(), Keeps(), Keeps()
    newcomer.folder = "/own"
    sender, receiver, last = map(attributes_of, (first, newcomer, third))
    first.go_on()
    receiver.load(copy.deepcopy(sender.dump()))
    assert newcomer.folder == "/own"
    last.load(copy.deepcopy(receiver.dump()))
    newcomer.folder = first.folder
    assert text_of(newcomer) == text_of(third) == text_of(first), "a newcomer sends on what it was sent"


def test_what_is_small_is_put_back_into_the_same_collections():
    kept = Keeps()
    noting = attributes_of(kept)
    same, before = (kept.seen, kept.by), text_of(kept)
    noted = noting.note()
    for _ in range(2):
        kept.go_on()
        noting.put_back(noted)
        assert kept.large[0] > 0, "what is large stays"
        kept.large.zero_()
        assert text_of(kept) == before
        assert all(map(operator.is_, (kept.seen, kept.by), same))


def test_what_cant_be_sent_is_named_once_by_its_type():
    kept, told = Keeps(), []
    sending = attributes_of(kept, told.append)
    kept.average_model, kept.hook, kept.own = torch.nn.Linear(1, 1), print, Keeps()
    for _ in range(2):
        assert "own" not in sending.dump()["changed"].get("one", {})
    what = "is not sent to workers that come later: keep it as plain data"
    assert told == [f"the callback Keeps: average_model, a Linear, {what}", f"the callback Keeps: own, a Keeps, {what}"]


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/me/.local/lib/python3.11/site-packages/library/layers.py", False),
        (copy.__file__, False),
        ("/home/me/experiment/layers.py", True),
    ],
)
def test_a_class_of_an_installed_package_is_no_scripts_wherever_packages_are(monkeypatch, file, is_own):
    module = ModuleType("layers_of_somebody")
    module.__file__ = file
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_scripts_own(type("Layer", (), {"__module__": module.__name__})) is is_own
