"""Several calls of ``fit``: who has to catch up, and with what."""

from types import SimpleNamespace

import pytest
from elastic_kit import Board, SumOfThreads, in_threads

from elasticdl.common.errors import JobFailedError
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import ALONE, Member, StageSuperseded, World, WorldChanged
from elasticdl.elastic.keras.fit_stages import Stages


def outcome(value):
    return SimpleNamespace(history={"loss": [value]}), value, Progress(step=value)


def after(stages):
    """A process that has trained to the end of so many."""
    made = Stages()
    for number in range(1, stages + 1):
        made.end(*outcome(number))
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

    return in_threads(enter, range(len(members)))


def test_newcomers_are_handed_what_they_have_missed():
    root, newcomer, halfway = after(2), Stages(), after(1)
    assert meet([root, newcomer, halfway], [True, False, False]) == [WorldChanged, StageSuperseded, StageSuperseded]
    for stage in (1, 2):
        assert newcomer.overtaken
        history = SimpleNamespace()
        assert newcomer.repeat(history) == stage
        assert history.history == {"loss": [stage]}
        assert not newcomer.has_state
    halfway.repeat(SimpleNamespace())
    assert not newcomer.overtaken
    assert meet([root, newcomer, halfway], [True, False, False]) == [None] * 3


def test_a_rank_0_that_missed_the_end_of_a_stage_ends_it_by_itself():
    behind, ahead, newcomer = Stages(), after(1), Stages()
    assert meet([behind, ahead, newcomer], [True, True, False]) == [StageSuperseded, WorldChanged, WorldChanged]
    assert not behind.overtaken
    behind.end(*outcome(1))
    assert meet([behind, ahead, newcomer], [True, True, False]) == [WorldChanged, WorldChanged, StageSuperseded]


@pytest.mark.parametrize("size", [1, 2])
def test_a_later_stage_does_not_begin_without_its_state(size):
    assert meet([after(1)] * size, [False] * size) == [JobFailedError] * size


def test_a_script_that_runs_alone_goes_on_by_itself():
    stages = Stages()
    stages.end(*outcome(1))
    assert not stages.overtaken
    stages.meet(SimpleNamespace(world=ALONE))
    assert (stages.present, stages.progress.step) == (2, 1)
