"""What a callback of the user's own keeps: it travels as what it is, or is named."""

import dataclasses
import enum
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import elasticdl.elastic.keras.backend  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest
import tensorflow as tf
from elastic_fit_kit import Fitting, data_of, dense, fit_with_a_newcomer, numbers

from elasticdl.elastic.training import attributes, plain_data

X, Y = numbers()
Pair = namedtuple("Pair", "first second")


class Phase(enum.Enum):
    WARM = "warm"
    COLD = "cold"


class Level(enum.IntEnum):
    LOW = 1


class Seen(enum.Flag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Best:
    epoch: int
    weights: list
    phase: Phase = Phase.WARM


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
    Phase.COLD,
    Level.LOW,
    Seen.LOW | Seen.HIGH,
    Best(3, [np.arange(3)], Phase.COLD),
    {Phase.WARM: {Best(1, []).epoch: (1, deque([{2}]))}},
    Pair(1, [2]),
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
    back = plain_data.loads(plain_data.dumps(value))
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
    assert attributes.assigned(present, value, attributes.Kinds()) is held
    assert held == value


def made_in_a_function():
    @dataclasses.dataclass
    class Local:
        number: int = 0

    return Local()


@pytest.mark.parametrize(
    "value",
    [
        *(made_in_a_function(), Text("a"), object(), np.array([object()]), defaultdict(lambda: 1), {"a": [object()]}),
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
        self.last, self.seen, self.by = deque(maxlen=3), set(), defaultdict(lambda: deque(maxlen=2))
        self.best = self.phase = None
        self.count = tf.Variable(0)
        self.mean = keras.metrics.Mean()
        self.stream, self.older, self.python = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.lock, self.own = threading.Lock(), object()

    def on_epoch_end(self, epoch, logs=None):
        self.last.append(logs["loss"])
        self.seen.add(epoch)
        self.by[epoch % 2].append(logs["loss"])
        self.best, self.phase = Best(epoch, [logs["loss"]]), Phase.COLD
        self.count.assign_add(1)
        self.mean.update_state(logs["loss"])
        drawn = self.stream.random() + self.older.rand() + self.python.random()
        if len(self.last) == 3 and self.last[0] - self.last[-1] < 100:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * (0.5 + drawn / 10)


def test_a_newcomer_decides_as_the_others_do(caplog):
    caplog.set_level("INFO")
    callbacks = [Everything(), Everything()]
    members = fit_with_a_newcomer(
        lambda rank: Fitting(dense(), data_of(X, Y), [callbacks[rank]], epochs=6), joins_after=17
    )
    rates = [float(member.model.optimizer.learning_rate) for member in members]
    assert rates[0] == rates[1] != pytest.approx(0.02)
    for one, other in zip(members[0].weights(), members[1].weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    first, newcomer = callbacks
    assert newcomer.last == first.last
    assert newcomer.last.maxlen == 3
    assert newcomer.seen == first.seen == set(range(6))
    assert newcomer.by == first.by
    assert newcomer.by["new"].maxlen == 2, "the factory is the newcomer's own function"
    assert (newcomer.best, newcomer.phase) == (first.best, first.phase)
    assert int(newcomer.count) == int(first.count) == 6
    assert float(newcomer.mean.result()) == float(first.mean.result())
    told = [record.getMessage() for record in caplog.records if "is not sent to workers" in record.getMessage()]
    assert [line.split(",")[0] for line in told] == ["the callback Everything has own (object)"]


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
