"""What the tests of Keras's elastic ``fit`` share: workers in the threads of one process, each with a call of its own."""

from __future__ import annotations

import contextlib

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
from elastic_kit import Board, SumOfThreads, in_threads
from session_kit import FakeMaster, enter

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldChanged
from elasticdl.elastic.keras.fit import Fit, FitCall
from elasticdl.elastic.keras.fit_data import FitData
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.keras.loader import ElasticContext
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors

BATCH = 16
SAMPLES = 64


def numbers(samples=SAMPLES, features=6):
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(samples, features)).astype("float32")
    return inputs, (inputs @ generator.normal(size=(features, 1))).astype("float32")


X, Y = numbers()


def sequences(samples=48, steps=5):
    """Of unequal lengths, the long ones of each batch first; what comes after is 0, to be masked."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(samples, steps, 2)).astype("float32")
    lengths = np.sort(generator.integers(1, steps + 1, samples).reshape(-1, BATCH), 1)[:, ::-1].ravel()
    inputs[np.arange(steps)[None] >= lengths[:, None]] = 0
    return inputs, generator.normal(size=(samples, steps, 1)).astype("float32")


class Batches(keras.utils.PyDataset):
    """Draws a new order between epochs; what reading leaves behind is of its process."""

    def __init__(self, draws=False, grows_in=None):
        """``draws``: where it is read, too."""
        super().__init__()
        self.random, self.draws, self.grows_in = np.random.default_rng(3), draws, grows_in
        self.order, self.level, self.calls = np.arange(len(X)), 1.0, []
        self.opened, self.read = -1, {}

    def __len__(self):
        return len(X) // BATCH + (len(self.calls) == self.grows_in)

    def __getitem__(self, number):
        self.opened = number
        self.read[number] = True
        if self.draws:
            self.random.random()
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return X[rows] * np.float32(self.level), Y[rows]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.random.shuffle(self.order)


def dense(*middle, optimizer=None, loss="mse", **compiled):
    """Compiled, with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *middle, keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.02), loss, jit_compile=False, **compiled)
    return model


class Fitting:
    """One worker's call of ``fit``; `join` brings it into a world, which `train` goes through."""

    def __init__(
        self, model, data, callbacks=(), *, most=BATCH, batch=BATCH, epochs=3, stages=None, check_state="off", **options
    ):
        self.model, self.callbacks = model, callbacks
        self.history = keras.callbacks.History()
        self.collective = SumOfThreads(0, Board(1), TensorFlowTensors())
        self.context = ElasticContext(FakeMaster().session, self.collective, BatchPolicy(batch, None, most), seed=0)
        self.context.check_state = check_state
        given = {"initial_epoch": 0, "verbose": 0, "shuffle": False, "validation_freq": 1, **options}
        call = FitCall(data, [*callbacks, self.history], epochs=epochs, **given)
        self.fit = Fit(self.context, stages or Stages(), model, call)

    def join(self, rank, board, members=None):
        """``members``: as they stood when they asked for this world; without them nobody has a state."""
        self.collective.enter(rank, board)
        if members is not None:
            self.collective.world = World.of(1, members, rank)
        context = self.context
        world = self.collective.world

        def synchronize():
            self.fit.before_sync(world)
            self.fit.state.sync(world)

        enter(context, world, synchronize)
        self.fit.on_world(world)

    def train(self, until=None):
        """To the end, or until after a step."""

        def leave():
            if self.fit.state.step == until:
                raise WorldChanged("the test wants it")

        self.fit._after_commit = leave
        with contextlib.suppress(WorldChanged):
            self.fit.train()

    @property
    def member(self):
        progress = self.fit.state.progress
        return Member(0, "h", progress.step, True, epoch=progress.epoch, synced_in=1)

    def weights(self):
        return [np.array(value) for value in self.model.get_weights()]


def fit_together(workers, make):
    """``make(rank)`` gives each worker's `Fitting`; all train from the first step to the last."""
    board = Board(workers)
    members = [make(rank) for rank in range(workers)]

    def train(rank):
        members[rank].join(rank, board)
        members[rank].train()

    in_threads(train, range(workers))
    return members


def fit_with_a_newcomer(make, joins_after):
    """One worker trains alone until that step; then another one, made only then, trains along to the end."""
    first = make(0)
    first.join(0, Board(1))
    first.train(until=joins_after)
    newcomer, board = make(1), Board(2)
    listed = (first.member, Member(1, "h", 0, False))
    members = [first, newcomer]

    def train(rank):
        members[rank].join(rank, board, listed)
        members[rank].train()

    in_threads(train, range(2))
    return members


def data_of(x, y=None, **given):
    return FitData.of(x, y, **given)


def plainly(model, x, y=None, callbacks=(), **given):
    """What Keras's own ``fit`` makes of it: the history, and the weights."""
    sizes = {} if y is None else {"batch_size": BATCH}
    history = model.fit(
        x, y, **sizes, **{"epochs": 3, "shuffle": False, "verbose": 0, **given}, callbacks=list(callbacks)
    )
    return history.history, [np.array(value) for value in model.get_weights()]


def assert_as_plain(members, plain, rtol=1e-5):
    """Each member has the weights, and the history from the epoch in which it came, that Keras's own ``fit`` gives."""
    history, weights = plain
    for member in members:
        for one, other in zip(member.weights(), weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)
        for name, values in history.items():
            np.testing.assert_allclose(member.history.history[name], values, rtol=rtol, atol=1e-6, err_msg=name)
