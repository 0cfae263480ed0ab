"""Several calls of ``fit``: who has to catch up, and with what."""

import errno
from types import SimpleNamespace

import numpy as np
import pytest
from elastic_keras_kit import Board, SumOfThreads, make_model, run_all

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import ALONE, Member, StageSuperseded, World, WorldChanged
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.training import plain_data


def advance(activity):
    """Somebody listens."""


def outcome(value):
    model = make_model()
    model.set_weights([np.full_like(weights, value) for weights in model.get_weights()])
    pack = {"callbacks": {"0": {"seen": [value]}}}
    return model, SimpleNamespace(pack=lambda: pack), [{"told": value, "kept": {}}], Progress(step=value)


def after(stages, **options):
    """A process that has trained to the end of so many."""
    made = Stages(**options)
    for number in range(1, stages + 1):
        made.begin()
        made.end(*outcome(number), advance)
    made.begin()
    return made


def meet(members, has_state):
    """What each makes of a world of these, in rank order: None, or an error."""
    board = Board(len(members))
    listed = tuple(Member(number, "h", 0, has) for number, has in enumerate(has_state))

    def enter(rank):
        collective = SumOfThreads(rank, board)
        collective.world = World.of(7, listed, rank)
        try:
            members[rank].meet(collective)
        except (StageSuperseded, WorldChanged, JobFailedError) as error:
            return type(error)
        return None

    return run_all(range(len(members)), enter)


class Kept(SimpleNamespace):
    def set_model(self, model):
        self.model = model


def test_newcomers_are_handed_what_they_have_missed():
    root, newcomer, halfway = after(2), Stages(), after(1)
    assert meet([root, newcomer, halfway], [True, False, False]) == [WorldChanged, StageSuperseded, StageSuperseded]
    for stage in (1, 2):
        assert newcomer.overtaken
        model, callback = make_model(), Kept()
        assert newcomer.repeat(model, [callback], print) == [{"told": stage, "kept": {}}]
        assert all((weights == stage).all() for weights in model.get_weights())
        assert (callback.seen, callback.model) == ([stage], model)
        assert not newcomer.has_state
    halfway.repeat(make_model(), [Kept()], print)
    assert not newcomer.overtaken
    assert meet([root, newcomer, halfway], [True, False, False]) == [None] * 3


def test_a_rank_0_that_missed_the_end_of_a_stage_ends_it_by_itself():
    behind, ahead, newcomer = Stages(), after(1), Stages()
    assert meet([behind, ahead, newcomer], [True, True, False]) == [StageSuperseded, WorldChanged, WorldChanged]
    assert not behind.overtaken
    behind.end(*outcome(1), advance)
    behind.begin()
    assert meet([behind, ahead, newcomer], [True, True, False]) == [WorldChanged, WorldChanged, StageSuperseded]


@pytest.mark.parametrize("size", [1, 2])
def test_a_later_stage_does_not_begin_without_its_state(size):
    assert meet([after(1)] * size, [False] * size) == [JobFailedError] * size


def test_of_many_stages_the_weights_of_the_newest_are_kept():
    whole = len(after(1)._records.get(0))
    root = after(3, most_bytes=2 * whole)
    sizes = [len(root._records.get(number)) for number in range(3)]
    assert sum(sizes) <= 2 * whole
    assert sizes == sorted(sizes)
    assert sizes[-1] == whole
    newcomer = Stages(most_bytes=1)
    assert meet([root, newcomer], [True, False]) == [WorldChanged, StageSuperseded]
    found, told = [], []
    while newcomer.overtaken:
        model, callback = make_model(), Kept()
        before = model.get_weights()
        newcomer.repeat(model, [callback], told.append)
        stage = newcomer.present - 1
        assert callback.seen == [stage], "what callbacks keep is known of all stages"
        same = all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
        found.append(0 if same else int(model.get_weights()[0].flat[0]))
    assert found == [0, 0, 3]
    assert [f"after fit() number {stage} " in line for stage, line in enumerate(told, 1)] == [True] * 2


def test_a_full_disk_is_one_line(monkeypatch):
    def fail(value, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plain_data, "write", fail)
    with pytest.raises(UserError, match=r"what fit\(\) number 1 ended with could not be kept in .*: No space left"):
        Stages().end(*outcome(1), advance)


def test_a_script_that_runs_alone_keeps_no_records():
    stages = Stages()
    stages.end(*outcome(1), None)
    assert not stages.overtaken
    stages.meet(SimpleNamespace(world=ALONE))
    assert (stages.present, stages.progress.step) == (2, 1)
