"""What a data set keeps in attributes is the job's: its order, its generators, what a callback has set."""

import keras
import numpy as np
from elastic_fit_kit import BATCH, Fitting, data_of, dense, fit_together, fit_with_a_newcomer, numbers

from elasticdl.elastic.keras.data_attributes import MOST_BYTES, DataAttributes
from elasticdl.elastic.training import plain_data

X, Y = numbers()


class Batches(keras.utils.PyDataset):
    """Reads and shuffles by one generator; what reading leaves behind is of its process."""

    def __init__(self, draws=True):
        super().__init__()
        self.draws = draws
        self.random = np.random.default_rng(3)
        self.order, self.level = np.arange(len(X)), 1.0
        self.opened, self.read = -1, {}

    def __len__(self):
        return len(X) // BATCH

    def __getitem__(self, number):
        self.opened = number
        self.read[number] = True
        if self.draws:
            self.random.random()
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return X[rows] * np.float32(self.level), Y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


class Raising(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.level = 1 + epoch / 2


def fitting(data):
    def make(rank):
        return Fitting(dense(), data_of(data[rank]), [Raising(data[rank])], epochs=4)

    return make


def test_a_newcomer_s_data_set_is_as_those_of_the_others():
    data = [Batches(), Batches()]
    data[1].random.random(5)  # has read more, or less
    members = fit_with_a_newcomer(fitting(data), joins_after=6)
    np.testing.assert_array_equal(data[0].order, data[1].order)
    assert data[0].level == data[1].level == 2.5
    for one, other in zip(*(member.weights() for member in members), strict=True):
        np.testing.assert_array_equal(one, other)


def kept_by(source, change):
    kept = DataAttributes(source)
    source[0]
    kept.have_read()
    change(source)
    return kept


def change(source):
    source.level, source.opened = 2.0, 3
    source.random.random()


def test_what_reading_changes_stays_but_for_generators():
    mine = kept_by(Batches(), change)
    taken = plain_data.loads(plain_data.dumps(mine.taken()))
    assert set(taken) == {"level", "=random"}
    source = Batches()
    kept_by(source, lambda source: source[1]).put(taken)
    assert (source.level, source.opened) == (2.0, 1)
    assert source.random.random() == mine._source.random.random()


def test_what_is_large_stays_and_is_named_once_if_it_changes(caplog):
    source = Batches()
    source.samples, source.table = np.zeros(MOST_BYTES + 1, np.uint8), np.zeros(MOST_BYTES + 1, np.uint8)
    kept = kept_by(source, lambda source: source.samples.fill(1))
    for _ in range(2):
        assert not {"samples", "table"} & set(kept.taken())
    assert [record.message.partition(",")[0] for record in caplog.records] == ["the data set Batches changes samples"]


def test_a_newcomer_takes_the_job_s_epochs():
    """Its script has read the checkpoint that the job itself has written since."""
    data = [Batches(draws=False), Batches(draws=False)]

    def make(rank):
        later = {"initial_epoch": rank, "epochs": 4 - rank, "steps_per_epoch": 3}
        return Fitting(dense(), data_of(data[rank]), **later)

    steps = {"epochs": 4, "steps_per_epoch": 3}
    (alone,) = fit_together(1, lambda rank: Fitting(dense(), data_of(Batches(draws=False)), **steps))
    members = fit_with_a_newcomer(make, joins_after=5)
    np.testing.assert_array_equal(data[0].order, data[1].order)
    for member in members:
        assert member.fit.state.step == alone.fit.state.step
        for one, other in zip(member.weights(), alone.weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
