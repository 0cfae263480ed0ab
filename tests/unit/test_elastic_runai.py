"""Run:AI's elasticity API: its numbers, several calls of ``fit``, and its examples."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from elastic_kit import Board, SumOfThreads, in_threads

import elasticdl.elastic
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.elastic.core.plan import BatchPlan, BatchPolicy, Progress
from elasticdl.elastic.core.protocol import Member, StageSuperseded, World, WorldChanged
from elasticdl.elastic.keras.fit_stages import Stages
from elasticdl.elastic.training.batch_shape import BatchShape, CurrentJob

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "runai.md"

# Global batch, most samples on a GPU, GPUs; then what Run:AI's formula gave, and what ours gives.
ROWS = [
    ((256, 64, 3), (1, 85, 255), (2, 43)),
    ((128, 16, 3), (2, 21, 126), (3, 15)),
    ((100, 32, 1), (3, 33, 99), (4, 25)),
    ((256, 64, 5), (1, 51, 255), (1, 52)),
]


@pytest.mark.parametrize(("given", "theirs", "ours"), ROWS)
def test_where_run_ai_was_wrong(given, theirs, ours):
    batch, most, gpus = given
    steps = max(1, batch // (most * gpus))
    size = batch // (steps * gpus)
    assert (steps, size, steps * size * gpus) == theirs
    assert size > most or theirs[2] != batch
    numbers = BatchShape.of(BatchPolicy(batch, None, most), gpus, rank=0)
    assert (numbers.steps, numbers.batch_size) == ours
    equal = BatchPlan.equal(range(batch), gpus)
    plan = [[each.samples for each in equal.mine(rank, most)] for rank in range(gpus)]
    assert sum(map(sum, plan)) == batch
    assert max(map(max, plan)) == numbers.batch_size <= most
    assert max(map(len, plan)) == numbers.steps
    shown = f"| {batch}, {most}, {gpus} | {steps} | {size} | {theirs[2]} | {ours[0]} | {ours[1]} | {batch} |"
    assert shown in DOCUMENT.read_text()


def test_the_numbers_follow_the_world_and_alone_the_gpus():
    context = SimpleNamespace(under_master=True, policy=BatchPolicy(256, None, 64), size=1, rank=0)
    job = CurrentJob(context, gpus=8)
    assert job.numbers == BatchShape(4, 64, 256, 1, True)
    context.size, context.rank = 3, 2
    assert job.numbers == BatchShape(2, 43, 256, 3, False)
    alone = CurrentJob(SimpleNamespace(**{**vars(context), "under_master": False}), gpus=2)
    assert (alone.numbers.gpus, alone.numbers.steps) == (2, 2)
    assert alone.use_one_gpu() == 2
    assert (alone.numbers.gpus, alone.numbers.steps) == (1, 4)


def test_before_init_there_are_no_numbers():
    with pytest.raises(UserError, match="init"):
        CurrentJob().numbers  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'step'"):
        elasticdl.elastic.step  # noqa: B018


TINY = ("--epochs", "1")
BATCHES = ("--global_batch_size", "4", "--max_gpu_batch_size", "2")


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("elastic/keras/mlp.py", ()),
        pytest.param("elastic/keras/vgg16.py", (*BATCHES, "--samples", "10"), marks=pytest.mark.slow),
        pytest.param("elastic/torch/cnn.py", (), marks=pytest.mark.slow),
        pytest.param(
            "ga/keras/vgg16.py", ("--batch_size", "2", "--steps", "2", "--samples", "10"), marks=pytest.mark.slow
        ),
        pytest.param("ga/keras/mlp.py", (), marks=pytest.mark.slow),
    ],
)
def test_the_examples_run(example, arguments):
    command = [sys.executable, str(ROOT / "examples" / example), *TINY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in done.stdout


# -- several calls of ``fit``: who has to catch up --


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


def test_a_rank_0_that_missed_the_end_of_a_stage_ends_it_by_itself():
    behind, ahead, newcomer = Stages(), after(1), Stages()
    assert meet([behind, ahead, newcomer], [True, True, False]) == [StageSuperseded, WorldChanged, WorldChanged]
    assert not behind.overtaken
    behind.end(*outcome(1))
    assert meet([behind, ahead, newcomer], [True, True, False]) == [WorldChanged, WorldChanged, StageSuperseded]


def test_who_makes_a_stage_again_counts_it_once_and_has_no_state_till_it_is_sent_one():
    ahead, behind, newcomer = after(2), after(1), Stages()
    ends = [WorldChanged, StageSuperseded, StageSuperseded]
    assert meet([ahead, behind, newcomer], [True, False, False]) == ends
    behind.repeat(SimpleNamespace(history={}))
    assert (behind.present, behind.overtaken, behind.has_state) == (3, False, False)


@pytest.mark.parametrize("size", [1, 2])
def test_a_later_stage_does_not_begin_without_its_state(size):
    assert meet([after(1)] * size, [False] * size) == [JobFailedError] * size
