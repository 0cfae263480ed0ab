"""What a callback of the user's own keeps: it travels as what it is, or is named."""

import dataclasses
import enum
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest
from elastic_fit_kit import Fitting, data_of, dense, fit_with_a_newcomer, numbers

from elasticdl.common.errors import UserError
from elasticdl.elastic.keras import driver as callback_state
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
    assert attributes.assigned(present, value) is held
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


def test_a_class_that_is_not_there_is_one_line(monkeypatch):
    written = plain_data.dumps(Best(3, []))
    monkeypatch.delattr(f"{__name__}.Best")
    with pytest.raises(UserError, match=r"test_elastic_keras_callbacks\.Best, and there is no such class here"):
        plain_data.loads(written)


STAYS = ["own (object)", "mean (Mean)"]


class Everything(keras.callbacks.Callback):
    """A plateau rule of its own; and all that such a callback may keep."""

    def __init__(self):
        super().__init__()
        self.last, self.seen, self.by = deque(maxlen=3), set(), defaultdict(list)
        self.best, self.average = None, np.zeros(2)
        self.lock, self.own, self.mean = threading.Lock(), object(), keras.metrics.Mean()

    def on_epoch_end(self, epoch, logs=None):
        self.last.append(logs["loss"])
        self.seen.add(epoch)
        self.by[epoch % 2].append(logs["loss"])
        self.best = {"epoch": epoch, "losses": (logs["loss"],)}
        self.average += logs["loss"]
        if len(self.last) == 3 and self.last[0] - self.last[-1] < 100:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5


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
    assert newcomer.best == first.best
    np.testing.assert_array_equal(newcomer.average, first.average)
    told = [record.getMessage() for record in caplog.records if "is not sent to workers" in record.getMessage()]
    assert [line.split(",")[0] for line in told] == [f"the callback Everything has {what}" for what in STAYS]


def test_keras_s_own_callbacks_are_not_named():
    assert not callback_state.left_behind(keras.callbacks.CSVLogger("nowhere"))
    assert callback_state.left_behind(Everything()) == STAYS


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


class Counted(keras.callbacks.Callback):
    epochs = 0
    names = ("a", "b")

    def on_epoch_end(self, epoch, logs=None):
        Counted.epochs += 1


best = [float("inf")]
calm = [1]


def of_the_script(epoch, logs):
    best[0] = min(best[0], logs["loss"] - len(calm))


def of_a_closure():
    waited = 0

    def end(epoch, logs):
        nonlocal waited
        waited += 1

    return end


class Judge:
    def __init__(self):
        self.seen = 0

    def look(self, epoch, logs):
        self.seen += 1


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (Counted, "Counted.epochs, an attribute of its class"),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=of_the_script), "best, a variable of the script"),
        (
            lambda: keras.callbacks.LambdaCallback(on_epoch_end=of_a_closure()),
            "waited, a variable of the function around",
        ),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=Judge().look), "seen of the Judge whose look() it calls"),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), ""),
        (lambda: keras.callbacks.EarlyStopping("loss"), ""),
    ],
    ids=["class", "global", "closure", "method", "nothing", "keras"],
)
def test_what_a_callback_keeps_outside_is_named_once(make, title):
    fitting = Fitting(dense(), data_of(X, Y), [make()])
    told = []
    fitting.context.warn = told.append
    callbacks = fitting.fit.driver
    callbacks.enter(fitting.collective.world)
    callbacks.pack()
    assert not told
    for epoch in range(2):
        callbacks.on_epoch_end(epoch, {"loss": 2.0})
        callbacks.pack()
    assert [line.partition(" has changed ")[2].startswith(title) for line in told] == ([True] if title else [])
