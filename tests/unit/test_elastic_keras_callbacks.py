"""What a callback of the user's own keeps: it travels as what it is, or stays each worker's own."""

import dataclasses
import enum
import io
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest
from elastic_fit_kit import Fitting, data_of, dense, fit_with_a_newcomer, numbers

from elasticdl.elastic.training import attributes, plain_data

X, Y = numbers()
Pair = namedtuple("Pair", "first second")


class Text(str):
    __slots__ = ()


TRAVELS = [
    {1, 2},
    frozenset({"a"}),
    deque([1, 2], maxlen=3),
    deque(),
    defaultdict(list, {3: [1.0]}),
    defaultdict(None, {"a": 1}),
    OrderedDict([("b", 1), ("a", 2)]),
    Counter("abca"),
    {2: {None: (1, deque([{2}]))}},
    b"ab",
    1 + 2j,
    Path("a/b"),
    {"__kind__": "no", "__tuple__": 3},
    10**40,
    float("inf"),
]


@pytest.mark.parametrize("value", TRAVELS, ids=lambda value: type(value).__name__)
def test_values_travel_as_what_they_are(value):
    assert plain_data.is_plain(value)
    plain_data.write(value, file := io.BytesIO())
    back = plain_data.read(io.BytesIO(file.getvalue()))
    assert type(back) is type(value)
    assert plain_data.checksum(back) == plain_data.checksum(value)
    assert repr(back) == repr(value)
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory


@pytest.mark.parametrize(
    ("present", "value"),
    [(Counter(a=1, b=2), Counter(a=5)), (OrderedDict(a=1), OrderedDict(b=2)), ({1}, {2, 3}), (deque([1]), deque([2]))],
    ids=lambda value: type(value).__name__,
)
def test_a_collection_that_others_hold_as_well_has_anothers_content(present, value):
    held = present
    assert attributes.assigned(present, value) is held
    assert held == value


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Best:
    epoch: int = 0


@pytest.mark.parametrize(
    "value",
    [
        *(
            Best(),
            Level.LOW,
            Pair(1, 2),
            Text("a"),
            object(),
            np.array([object()]),
            defaultdict(lambda: 1),
            {"a": [object()]},
        ),
        *(np.ma.masked_array([1]), np.zeros(1, [("a", "f4")])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_not_plain(value):
    assert not plain_data.is_plain(value)


def test_an_outline_that_another_version_has_written_is_no_dict():
    with pytest.raises(ValueError, match="another version"):
        plain_data.put_together({"betas": {"__tuple__": [0.9, 0.999]}}, {})


class Everything(keras.callbacks.Callback):
    """A plateau rule of its own; and all that such a callback may keep."""

    def __init__(self):
        super().__init__()
        self.last, self.by, self.best = [], {}, None
        self.calm, self.note, self.kept = False, "", np.zeros(2)
        self.lock, self.own, self.mean = threading.Lock(), None, keras.metrics.Mean()

    def on_epoch_end(self, epoch, logs=None):
        self.last.append(logs["loss"])
        self.by[epoch % 2] = [epoch, logs["loss"]]
        self.best, self.calm, self.note = min(self.last), epoch > 1, f"epoch {epoch}"
        self.kept = self.kept + logs["loss"]
        self.own = object()
        if len(self.last) >= 3 and self.last[-3] - self.last[-1] < 100:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5


def test_a_newcomer_decides_as_the_others_do():
    callbacks = [Everything(), Everything()]
    members = fit_with_a_newcomer(
        lambda rank: Fitting(dense(), data_of(X, Y), [callbacks[rank]], epochs=6), joins_after=17
    )
    rates = [float(member.model.optimizer.learning_rate) for member in members]
    assert rates == pytest.approx([0.02 / 2**4] * 2)
    for one, other in zip(members[0].weights(), members[1].weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    first, newcomer = callbacks
    for name in ("last", "by", "best", "calm", "note"):
        assert getattr(newcomer, name) == getattr(first, name)
    np.testing.assert_array_equal(newcomer.kept, first.kept)
    assert newcomer.own is not first.own


class Begins(keras.callbacks.Callback):
    """Sets in a hook what does not travel, and what does."""

    def __init__(self):
        super().__init__()
        self.begun, self.told, self.number = object(), [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = (lambda: epoch,)
        self.told.append(epoch)
        self.number += 1
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


def test_a_newcomer_is_told_that_the_present_epoch_has_begun():
    callbacks, seen = [Begins(), Begins()], []

    def fitting(rank):
        member = Fitting(dense(), data_of(X, Y), [callbacks[rank]], epochs=4)
        on_world = member.fit.on_world
        member.fit.on_world = lambda world: (on_world(world), seen.append((rank, callbacks[rank].begun[0]())))
        return member

    callbacks[0].begun = (lambda: -1,)
    members = fit_with_a_newcomer(fitting, joins_after=10)
    assert seen[0] == (0, -1)
    assert sorted(seen[1:]) == [(0, 2), (1, 2)]
    for member, callback in zip(members, callbacks, strict=True):
        assert (callback.told, callback.number) == ([0, 1, 2, 3], 4)
        assert float(member.model.optimizer.learning_rate) == pytest.approx(0.02 / 2**4)
