"""What differs between the states of workers is named, or mended if it is no more than rounding."""

from __future__ import annotations

import elastic_kit
import loop_benches
import numpy as np
import pytest
import torch
from elastic_kit import Trainee
from keras_benches import KerasTrainee
from torch.optim.lr_scheduler import StepLR

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.tensorflow import keras

POLICY = BatchPolicy(16, None)
STEPS = 4  # of an epoch: 50 samples


def members_of(kind, check_state="epoch", workers=3, **options):
    board = elastic_kit.Board(workers)
    members = [kind(rank, board, POLICY, check_state=check_state, **options) for rank in range(workers)]
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

    return elastic_kit.in_threads(work, members)


def weights(member):
    if isinstance(member.model, keras.Model):
        return member.model.get_weights()
    return [each.tolist() for each in member.model.state_dict().values()]


# -- what is planted --


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


def other_schedule(member):
    member.state.scheduler.last_epoch = 7


def other_average(member):
    member.state.average[0].weight.data.zero_()


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


def computed_otherwise(member):
    member.optimizer.param_groups[0].update(foreach=False, fused=False)


def as_newcomer(plant=lambda member: None):
    def planted(member):
        member.state._position.made = 0
        plant(member)

    return planted


# -- who has made no step and alone differs is refused alone --


@pytest.mark.parametrize(
    ("kind", "plant", "step", "named"),
    [
        (Trainee, other_rate, 1, "optimizer.param_groups.0.lr is 0.1 on worker 0 and 0.2 on worker 2"),
        (Trainee, scaled(1.01), 3, "model.0.weight differs by 0.0"),
        (Trainee, frozen, 1, "the workers train different parameters, of which this one has 2"),
        (Trainee, other_data, 3, "its training data have 51 samples, the job's 50"),
        (Trainee, other_buffer, 1, "the models of the workers have different buffers"),
        (KerasTrainee, other_rate, 1, "optimizer.learning_rate is 0.1 on worker 0 and 0.2 on worker 2"),
        (KerasTrainee, scaled(1.01), 3, "/kernel"),
        (KerasTrainee, frozen, 1, "the models of the workers have different variables, or train different ones"),
    ],
)
def test_it_is_named_and_the_others_make_the_step_again(kind, plant, step, named):
    members = members_of(kind)

    def new_world(member):
        """In the first step of which all is compared."""
        member.state._agreed = -1

    torn, other, refused = train(members, as_newcomer(plant), at=0, step=step, epochs=2, each=new_world)
    assert refused.startswith("refused: ")
    assert named in refused
    assert torn == other
    assert torn.startswith("torn: workers [2] are refused: ")
    assert [member.state.step for member in members] == [step + 1] * 3


@pytest.mark.parametrize(("epochs", "ended", "step"), [(1, 1, STEPS), (3, 2, 2 * STEPS)])
def test_who_ends_apart_from_the_rest_is_refused_too(epochs, ended, step):
    """Of the second epoch, the newcomer makes no step, or too many."""
    members = members_of(Trainee)

    def work(member):
        is_newcomer = member.context.rank == 2
        (said,) = train([member], epochs=epochs if is_newcomer else 2, each=as_newcomer() if is_newcomer else id)
        return said

    torn, other, refused = elastic_kit.in_threads(work, members)
    said = f"refused: {ended} of 3 workers ended their training after step {step} and the others go on: "
    assert refused.startswith(said)
    assert torn == other == f"torn: workers [2] are {refused}"


# -- otherwise the job ends in one line, at the latest before the second step of an epoch --


@pytest.mark.parametrize(
    ("kind", "plant", "at", "step", "named"),
    [
        (Trainee, scaled(1.01), (0, 3), 4, "model.0.weight differs by 0.0"),
        (KerasTrainee, scaled(1.01), (0, 3), 4, "/kernel"),
        (Trainee, other_slot, (0, 1), 4, "optimizer.state.0.momentum_buffer differs by"),
        (Trainee, other_statistic, (0, 1), 4, "model.1.running_mean differs by"),
        (Trainee, other_schedule, (0, 1), 4, "scheduler.last_epoch is 0 on worker 0 and 7"),
        (Trainee, other_average, (0, 1), 4, "average.0.weight differs by"),
        # A rate is found before it is used.
        (Trainee, other_rate, (1, 1), 6, "optimizer.param_groups.0.lr is 0.1 on worker 0 and 0.2 on worker 2"),
        (KerasTrainee, other_rate, (1, 1), 6, "optimizer.learning_rate is 0.1 on worker 0 and 0.2 on worker 2"),
    ],
)
def test_what_differs_is_named_and_nobody_has_stepped_since(kind, plant, at, step, named):
    def values(member):
        return {"scheduler": StepLR(member.optimizer, 1, gamma=0.5), "average": elastic_kit.make_model()}

    given = {"batch_norm": True, "values": values, "data": elastic_kit.make_data(64)}
    members = members_of(kind, **(given if kind is Trainee else {}))
    (line,) = set(train(members, plant, at=at[0], step=at[1]))
    assert line.startswith(f"after step {step} worker 2 holds another state than workers 0 and 1: ")
    assert named in line
    assert f"; after step {0 if step == STEPS else step - 1} they were the same: " in line
    assert line.endswith("What all workers hold must be computed alike on all (docs/reliability.md)")
    assert [member.state.step for member in members] == [step] * 3


@pytest.mark.parametrize("kind", [Trainee, KerasTrainee])
def test_rounding_is_mended_and_told_once(kind):
    members = members_of(kind)
    told = told_by(members)
    assert train(members, scaled(1 + 2**-23)) == [None] * 3
    (line,) = told
    assert line.startswith(f"after step {2 * STEPS} the workers' states were not the same, ")
    assert line.endswith(": all have taken rank 0's")
    for other in members[1:]:
        np.testing.assert_equal(weights(other), weights(members[0]))


@pytest.mark.parametrize(("kind", "stand_with_root"), [(Trainee, False), (Trainee, True), (KerasTrainee, False)])
def test_whatever_differs_can_be_repaired(kind, stand_with_root):
    members = members_of(kind, "repair")
    for rank, member in enumerate(members):
        listed = tuple(Member(i, "h", 0, stand_with_root) for i in range(3))
        member.context.collective.world = World.of(member.context.world.version, listed, rank)
    assert train(members, scaled(1.5)) == [None] * 3
    np.testing.assert_equal(weights(members[2]), weights(members[0]))


@pytest.mark.parametrize(
    ("check_state", "plants"), [("off", [scaled(1.5), other_rate]), ("epoch", [computed_otherwise])]
)
def test_what_nobody_looks_at_goes_on(check_state, plants):
    members = members_of(Trainee, check_state)
    told = told_by(members)
    assert train(members, lambda member: [plant(member) for plant in plants]) == [None] * 3
    assert told == []


def test_it_can_be_looked_at_each_so_many_steps():
    members = members_of(Trainee, "2")
    lines = train(members, scaled(1.5), at=0)
    assert "after step 2 " in lines[0]


def test_the_last_epoch_is_compared_at_the_end():
    members = members_of(Trainee)
    told = told_by(members)
    assert train(members, scaled(1.5), at=2, step=1) == [None] * 3
    (line,) = told
    assert line.startswith(f"training has ended after step {3 * STEPS}, and worker 2 holds another state than workers")
    assert f"; after step {2 * STEPS} they were the same: " in line


# -- what does not make the model --


def test_a_value_that_differs_is_told_once_and_nobody_ends():
    members = members_of(Trainee, values=lambda *_: {"best": 0.3, "seen": [1]})
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


# -- a plain loop --


class Plain(loop_benches.PlainScript):
    """Two epochs of four steps; ``plant`` is done on worker 1, in the first epoch, after two steps, and ``at_end``."""

    def __init__(self, plant, at_end=id):
        super().__init__(Plain.go, elastic_kit.make_model, samples=32)
        self.plant, self.at_end, self.draws = plant, at_end, 0

    def go(self):
        for _ in range(2):
            for x, y in self.loader:
                self.loss(x, y).backward()
                self.step()
                if (self.worker, self.made) == (1, 2):
                    self.plant(self)
            np.random.rand(self.draws)
        if self.worker:
            self.at_end(self)


def plain_loops(*plants):
    job = loop_benches.Job(2)
    scripts = [Plain(*plants) for _ in range(2)]
    return job.run(lambda worker: scripts[worker].train(job))[0], job.warnings


HOLD_DIFFERENT = "worker 0 and worker 1 hold different states: "


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (scaled(1.5), f"4 {HOLD_DIFFERENT}model.0.weight differs by"),
        (other_rate, f"2 {HOLD_DIFFERENT}optimizer.param_groups.0.lr is 0.1 on worker 0 and 0.2 on worker 1"),
        (lambda script: vars(script.values).update(steps=1.5), "4 Values.steps is 0 on worker 0 and 1.5 on worker 1: "),
        (lambda script: vars(script).update(draws=1), "4 random.numpy differs: is something drawn on one worker only"),
    ],
    ids=["weight", "rate", "value", "stream"],
)
def test_what_differs_in_a_plain_loop_ends_it_or_is_told_once(plant, named):
    said, told = plain_loops(plant)
    (line,) = set(map(str, said)) if HOLD_DIFFERENT in named else told
    assert line.startswith(f"after step {named}"), line
    assert HOLD_DIFFERENT in named or said == (None, None)


def test_the_end_of_a_plain_loop_is_compared_as_its_last_epoch_left_it():
    """A script may change its model when it has trained, as to write it."""
    assert plain_loops(id, scaled(1.5)) == ((None, None), [])
