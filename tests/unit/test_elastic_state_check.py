"""What differs between the states of workers is named, or mended if it is no more than rounding."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import elastic_keras_kit
import elastic_kit
import numpy as np
import pytest
import torch
from elastic_fit_kit import Fitting, data_of, dense, numbers
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.torch_kit.tensors import RandomStreams
from elasticdl.elastic.torch_kit.torch_state import PREPARED
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.tensorflow import keras

POLICY = BatchPolicy(16, None)
STEPS = 4  # of an epoch: 50 samples
ENDS = "What all workers hold must be computed alike on all (docs/reliability.md)"


def members_of(kit, check_state="epoch", workers=3, **options):
    board = kit.Board(workers)
    members = [kit.Trainee(rank, board, POLICY, check_state=check_state, **options) for rank in range(workers)]
    for rank, member in enumerate(members):
        member.state._check._worker_id = member.context._core.worker_id = rank
    return members


def told_by(members):
    """What goes into the journal, from now on."""
    told = []
    for member in members:
        member.state._check._tell = told.append
    return told


def train(members, plant=lambda member: None, epochs=3, at=1, step=0, each=lambda member: None):
    """``plant`` is done on rank 2 in this epoch, after its step of this number, from 0. Returns what each member ends with: None,
    or what it says. ``each``: done on each member after each step."""

    def work(member):
        try:
            for epoch in member.loader.epochs(epochs):
                for number, batch in enumerate(member.loader):
                    (member.state if isinstance(member.model, keras.Model) else member).make_step(batch)
                    member.state.commit()
                    if (epoch, number) == (at, step) and member.context.rank == 2:
                        plant(member)
                    each(member)
            member.state.cast_end_vote()
        except UserError as error:
            return str(error)
        except WorldBroken as error:
            return f"torn: {error}"
        return None

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members, timeout=200))


def weights(member):
    if isinstance(member.model, keras.Model):
        return member.model.get_weights()
    return [each.tolist() for each in member.model.state_dict().values()]


def scaled(factor):
    def plant(member):
        if isinstance(member.model, keras.Model):
            variable = member.model.trainable_variables[0]
            variable.assign(variable.numpy() * np.float32(factor))
        else:
            with torch.no_grad():
                member.model[0].weight *= factor

    return plant


def other_rate(member):
    if isinstance(member.model, keras.Model):
        member.optimizer.learning_rate = 0.2
    else:
        member.optimizer.param_groups[0]["lr"] = 0.2


def other_slot(member):
    next(iter(member.optimizer.state.values()))["momentum_buffer"] += 1.0


def other_statistic(member):
    member.model[1].running_mean += 1.0


KITS = pytest.mark.parametrize("kit", [elastic_kit, elastic_keras_kit], ids=["torch", "keras"])


# -- what makes the model --


def as_newcomer(plant):
    def planted(member):
        member.state._position.made = 0
        plant(member)

    return planted


def frozen(member):
    if isinstance(member.model, keras.Model):
        first = member.model.layers[0]
        first.trainable = False
        member.state.train_step._trainable = member.model.trainable_variables
    else:
        member.model[0].requires_grad_(False)


def other_data(member):
    member.state.sources = [Source.of(TRAINING, list(range(51)))]


def other_buffer(member):
    member.model.register_buffer("more", torch.zeros(2))
    member.state.reducer._buffers.find()  # as one that comes with it


@pytest.mark.parametrize(
    ("kit", "plant", "step", "named"),
    [
        (elastic_kit, other_rate, 1, "optimizer.param_groups.0.lr is 0.1 on worker 0 and 0.2 on worker 2"),
        (elastic_kit, scaled(1.01), 3, "model.0.weight differs by 0.0"),
        (elastic_kit, frozen, 1, "the workers train different parameters, of which this one has 2"),
        (elastic_kit, other_data, 3, "its training data have 51 samples, the job's 50"),
        (elastic_keras_kit, other_data, 3, "its training data have 51 samples, the job's 50"),
        (elastic_kit, other_buffer, 1, "the models of the workers have different buffers"),
        (elastic_keras_kit, other_rate, 1, "optimizer.learning_rate is 0.1 on worker 0 and 0.2 on worker 2"),
        (elastic_keras_kit, scaled(1.01), 3, "/kernel"),
        (elastic_keras_kit, frozen, 1, "the models of the workers have different variables, or train different ones"),
    ],
)
def test_who_has_made_no_step_and_alone_differs_is_refused_alone(kit, plant, step, named):
    members = members_of(kit)

    def new_world(member):
        """In the first step of which all is compared."""
        member.state._agreed = -1

    torn, other, refused = train(members, as_newcomer(plant), at=0, step=step, epochs=2, each=new_world)
    assert refused.startswith("refused: ")
    assert named in refused
    assert torn == other
    assert torn.startswith("torn: workers [2] are refused: ")
    assert [member.state.step for member in members] == [step + 1] * 3


@pytest.mark.parametrize("epochs", [1, 3], ids=["too early", "too late"])
@KITS
def test_who_has_made_no_step_and_ends_apart_from_the_rest_is_refused_alone(kit, epochs):
    members = members_of(kit)
    (newcomer,) = (member for member in members if member.context.rank == 2)

    def work(member):
        """Of the second epoch, the newcomer makes no step, or too many."""
        forget = as_newcomer(lambda _: None) if member is newcomer else lambda _: None
        (said,) = train([member], epochs=epochs if member is newcomer else 2, each=forget)
        return said

    with ThreadPoolExecutor(len(members)) as pool:
        torn, other, refused = pool.map(work, members, timeout=200)
    ended, step = (1, STEPS) if epochs == 1 else (2, 2 * STEPS)
    said = f"refused: {ended} of 3 workers ended their training after step {step} and the others go on: "
    assert refused.startswith(said)
    assert torn == other == f"torn: workers [2] are {refused}"


@KITS
def test_a_piece_that_differs_ends_the_job_before_the_second_step_of_its_epoch(kit):
    members = members_of(kit)
    (line,) = set(train(members, scaled(1.01), at=0, step=3, epochs=2))
    assert line.startswith(f"after step {STEPS} worker 2 holds another state than workers 0 and 1: ")
    assert ("/kernel" if kit is elastic_keras_kit else "model.0.weight differs by 0.0") in line
    assert "; after step 0 they were the same: " in line
    assert line.endswith(ENDS)
    assert members[0].state.step == STEPS, "the parameters have not changed since"


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (other_slot, "optimizer.state.0.momentum_buffer differs by"),
        (other_statistic, "model.1.running_mean differs by"),
        (lambda each: setattr(each.state.scheduler, "last_epoch", 7), "scheduler.last_epoch is 0 on worker 0 and 7"),
        (lambda each: each.state.average[0].weight.data.zero_(), "average.0.weight differs by"),
    ],
)
def test_what_else_makes_the_model_is_named(plant, named):
    def values(member):
        return {"scheduler": StepLR(member.optimizer, 1, gamma=0.5), "average": elastic_kit.make_model()}

    members = members_of(elastic_kit, batch_norm=True, values=values)
    (line,) = set(train(members, plant, at=0, step=1, epochs=2))
    assert named in line


@KITS
def test_a_rate_that_one_worker_sets_is_named_before_it_is_used(kit):
    members = members_of(kit)
    (line,) = set(train(members, other_rate, at=1, step=1))
    at = STEPS + 2
    name = "optimizer.learning_rate" if kit is elastic_keras_kit else "optimizer.param_groups.0.lr"
    differ = f"worker 2 holds another state than workers 0 and 1: {name} is 0.1 on worker 0"
    assert line.startswith(f"after step {at} {differ}")
    assert f" and 0.2 on worker 2; after step {at - 1} they were the same: is it set on one worker only, " in line
    assert [member.state.step for member in members] == [at] * 3


@KITS
def test_rounding_is_mended_and_told_once(kit):
    members = members_of(kit)
    told = told_by(members)
    assert train(members, scaled(1 + 2**-23)) == [None] * 3
    (line,) = told
    assert line.startswith(f"after step {2 * STEPS} the workers' states were not the same, ")
    assert line.endswith(": all have taken rank 0's")
    for other in members[1:]:
        np.testing.assert_equal(weights(other), weights(members[0]))


@KITS
@pytest.mark.parametrize("stand_with_root", [False, True])
def test_whatever_differs_can_be_repaired(kit, stand_with_root):
    members = members_of(kit, "repair")
    for rank, member in enumerate(members):
        listed = tuple(Member(i, "h", 0, stand_with_root) for i in range(3))
        member.context.collective.world = World.of(member.context.world.version, listed, rank)
    assert train(members, scaled(1.5)) == [None] * 3
    np.testing.assert_equal(weights(members[2]), weights(members[0]))


def computed_otherwise(member):
    member.optimizer.param_groups[0].update(foreach=False, fused=False)


@pytest.mark.parametrize(
    ("check_state", "plants"), [("off", [scaled(1.5), other_rate]), ("epoch", [computed_otherwise])]
)
def test_what_nobody_looks_at_goes_on(check_state, plants):
    members = members_of(elastic_kit, check_state)
    told = told_by(members)
    assert train(members, lambda member: [plant(member) for plant in plants]) == [None] * 3
    assert told == []


def test_it_can_be_looked_at_each_so_many_steps():
    members = members_of(elastic_kit, "2")
    lines = train(members, scaled(1.5), at=0)
    assert "after step 2 " in lines[0]
    members = members_of(elastic_kit, "1")
    assert train(members, epochs=1) == [None] * 3
    assert members[0].state._check._same == STEPS - 1


@KITS
def test_the_last_epoch_is_compared_at_the_end(kit):
    members = members_of(kit)
    told = told_by(members)
    assert train(members, scaled(1.5), at=2, step=1) == [None] * 3
    (line,) = told
    assert line.startswith(f"training has ended after step {3 * STEPS}, and worker 2 holds another state than workers")
    assert f"; after step {2 * STEPS} they were the same: " in line


# -- what does not make it --


@KITS
def test_a_value_that_differs_is_told_once_and_nobody_ends(kit):
    members = members_of(kit, values=lambda *_: {"best": 0.3, "seen": [1]})
    told = told_by(members)

    def plant(member):
        member.state.best = 0.2

    assert train(members, plant, at=0, step=1, epochs=4) == [None] * 3
    (line,) = told
    assert line.startswith(f"after step {STEPS} best is 0.3 on worker 0 and 0.2 on worker 2: is it computed from one ")
    assert "Workers that join take worker 0's" in line
    assert members[2].state.best == 0.2
    assert members[0].state._check._same == 3 * STEPS, "the model was compared nevertheless"
    reporting = members[0].context.session.core.reporting
    assert [report.compared for report in reporting._made] == [3, 0, 0, 0] * 4


def fit_compared(callbacks=lambda rank: [], layers=lambda rank: []):
    """Two workers' calls of ``fit``: what each has said, and what went into the journal."""
    board, told, data = elastic_keras_kit.Board(2), [], data_of(*numbers())
    members = [Fitting(dense(*layers(rank)), data, callbacks(rank), check_state="epoch") for rank in range(2)]

    def work(rank):
        check = members[rank].fit.state._check
        check._worker_id, check._tell = rank, told.append
        members[rank].join(rank, board)
        try:
            members[rank].train()
        except UserError as error:
            return str(error)
        return None

    return elastic_keras_kit.run_all(range(2), work), told


def test_what_a_callback_of_keras_keeps_is_told():
    class Watches(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank, self.wait, self.calls = rank, 0, 0  # what does not change does not travel

        def on_epoch_end(self, epoch, logs=None):
            self.wait, self.calls = 3 * self.rank, self.calls + 1

    def callbacks(rank):
        return [Watches(rank), keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)]

    said, (line,) = fit_compared(callbacks)
    assert said == [None, None]
    assert line.startswith("after step 4 callbacks.Watches.wait is not there on worker 0 and 3 on worker 1: ")


def test_what_a_layer_of_the_scripts_own_keeps_is_compared():
    class Scaled(keras.layers.Layer):
        def __init__(self, factor):
            super().__init__(name="scaled")
            self.factor, self.seen = factor, [1]

        def call(self, inputs):
            return inputs * self.factor

    said, (line,) = fit_compared(layers=lambda rank: [Scaled(rank + 1.0)])
    assert said == [None, None]
    assert line.startswith("after step 0 Scaled scaled#2.factor is 1 on worker 0 and 2 on worker 1: ")


# -- a plain loop --


class Average:
    def __init__(self):
        self.sum = 0.0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Plain:
    """One worker's plain loop of two epochs of four steps; ``plant`` is done on rank 1, in the first epoch, after two steps."""

    def __init__(self, rank, board, plant):
        self.rank, self.plant, self.told = rank, plant, []
        self.model = elastic_kit.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        self.average = Average()
        values = {f"{PREPARED}0": self.average, f"{PREPARED}1": self.scheduler}
        given = self.model, self.optimizer, DataLoader(elastic_kit.make_data(), batch_size=16)
        self.script = elastic_kit.PlainScript(rank, board, *given, values, check_state="epoch")
        self.script.context.warn = self.told.append

    def run(self):
        try:
            for epoch in range(2):
                for number, (inputs, labels) in enumerate(self.script.loader):
                    self.script.host.participant.state._check._worker_id = self.rank
                    cross_entropy(self.model(inputs), labels).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if (self.rank, epoch, number) == (1, 0, 1):
                        self.plant(self)
            self.script.host.finish()
        except UserError as error:
            return str(error)
        return None


def stream(member):
    """Its next epoch begins with other random streams."""
    place = member.script.host.participant.position
    note = place.note_streams

    def note_other(epoch, *given, **more):
        note(epoch, *given, **more)
        pythons, _, torchs = pickle.loads(place.streams[epoch])
        place.streams[epoch] = pickle.dumps((pythons, np.random.RandomState(7).get_state(), torchs))

    place.note_streams = note_other


@pytest.fixture
def _one_stream(monkeypatch):
    """The random streams of the threads are those of one process."""
    captured = RandomStreams.capture()
    monkeypatch.setattr(RandomStreams, "capture", staticmethod(lambda: captured))


def plain_loops(plant, at_end=None):
    board = elastic_kit.Board(2)
    members = [Plain(rank, board, plant) for rank in range(2)]
    if at_end:
        finish = members[1].script.host.finish
        members[1].script.host.finish = lambda: (at_end(members[1]), finish())
    return elastic_kit.in_threads(Plain.run, members), [member.told for member in members]


HOLD_DIFFERENT = "worker 0 and worker 1 hold different states: "


@pytest.mark.usefixtures("_one_stream")
@pytest.mark.parametrize(
    ("plant", "step", "named"),
    [
        (scaled(1.5), 4, f"{HOLD_DIFFERENT}model.0.weight differs by"),
        (other_rate, 2, f"{HOLD_DIFFERENT}optimizer.param_groups.0.lr is 0.1 on worker 0 and 0.2 on worker 1"),
        (lambda each: setattr(each.average, "sum", 1.5), 4, "Average.sum is 0 on worker 0 and 1.5 on worker 1: is it "),
        (stream, 4, "random.numpy differs: is something drawn on one worker only, as where the rank is 0? "),
    ],
    ids=["weight", "rate", "value", "stream"],
)
def test_what_differs_in_a_plain_loop_ends_it_or_is_told_once(plant, step, named):
    said, (told, others) = plain_loops(plant)
    (line,) = set(said) if HOLD_DIFFERENT in named else told
    assert line.startswith(f"after step {step} {named}"), line
    assert HOLD_DIFFERENT in named or (said, others) == ([None, None], [])


@pytest.mark.usefixtures("_one_stream")
def test_the_end_of_a_plain_loop_is_compared_as_its_last_epoch_left_it():
    """A script may change its model when it has trained, as to write it."""
    assert plain_loops(lambda member: None, at_end=scaled(1.5)) == ([None, None], [[], []])
