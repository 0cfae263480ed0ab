"""What every front end keeps, whatever its library: promises, and the benches of `front_ends` on which each of them is tried."""

from __future__ import annotations

import numpy as np
import pytest
from front_ends import FRONT_ENDS, STEPS, Script
from job_kit import Job, Lost
from refusal_kit import require_refusal

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # as sums in another order make it
TO_THE_BIT = {"rtol": 0, "atol": 0}
MIDDLE, LAST = STEPS + 2, 2 * STEPS  # steps: within the second epoch; of all
PROMISES = []


def promise(name):
    """A test of this promise, on all benches but those that lack it."""
    PROMISES.append(name)
    kept = [title for title, each in FRONT_ENDS.items() if name not in each.lacks]
    return pytest.mark.parametrize("bench", kept, indirect=True)


@pytest.fixture
def bench(request, monkeypatch):
    """``bench(script, ...)``: what each worker has said and trained, and the job."""
    kind = FRONT_ENDS[request.param].load()

    def make_job(*arguments, **options):
        job = getattr(kind, "Job", Job)(*arguments, **options)
        for name in getattr(kind, "runtimes", ()):
            monkeypatch.setattr(name, job)
        return job

    def run(script, *arguments, **options):
        job = make_job(*arguments, **options)
        workers = [kind(script) for _ in range(job.workers + job.comers)]
        said, _ = job.run(lambda rank: workers[rank].train(job))
        return said, [each.trained() for each in workers], job

    def alone(script):
        made = kind(script)
        made.alone()
        return made.trained()

    run.kind, run.alone, run.make_job = kind, alone, make_job
    return run


def assert_trained(ours, theirs, *, whole=True, **tolerances):
    """``whole``: from the first step on."""
    assert len(ours.weights) == len(theirs.weights) > 0
    for mine, its in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, its, **tolerances)
    assert ours.losses or not whole
    expected = theirs.losses if whole else theirs.losses[len(theirs.losses) - len(ours.losses) :]
    np.testing.assert_allclose(ours.losses, expected, **tolerances)
    assert ours.calls == theirs.calls, "what the model keeps in an attribute"


@promise("alone to the bit")
@pytest.mark.parametrize("under_master", [True, False])
def test_alone_it_is_the_librarys_own_to_the_bit(bench, under_master):
    """With its random numbers."""
    script = Script(shuffle=True, draws=True)
    (said,), (ours,), job = bench(script, under_master=under_master)
    theirs = bench.alone(script)
    assert said is None
    assert_trained(ours, theirs, **TO_THE_BIT)
    assert ours.drawn == theirs.drawn
    assert not job.warnings


@promise("workers as one")
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_make_the_steps_of_one(bench, workers):
    said, trained, job = bench(Script(), workers)
    assert said == (None,) * workers
    theirs = bench.alone(Script())
    for ours in trained:
        assert_trained(ours, theirs, **CLOSE)
    for mine, its in zip(trained[0].weights, trained[-1].weights, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert not job.warnings


@promise("a newcomer at any batch")
def test_a_worker_that_comes_later_goes_on_from_any_batch(bench):
    """With the order of the samples, and the random numbers, that the others have."""
    script = Script(shuffle=True, dropout=0.3)
    _, (whole,), job = bench(script)
    assert {*job.states} >= {*range(1, LAST)}
    for step, state in job.states.items():
        if 0 < step < LAST:
            (said,), (late,), _ = bench(script, finds=state, place=divmod(step, STEPS))
            assert said is None
            assert len(late.losses) == LAST - step
            assert_trained(late, whole, whole=False, **TO_THE_BIT)


@promise("a newcomer beside the others")
@pytest.mark.parametrize("later", [{}, {(0, MIDDLE + 1): "lost"}], ids=["and stays", "and is then alone"])
def test_a_worker_joins_another_that_trains(bench, later):
    said, trained, job = bench(Script(), 1, {(0, MIDDLE): "joined", **later})
    assert [type(each) for each in said] == [Lost if later else type(None), type(None)]
    theirs = bench.alone(Script())
    for ours in trained[len(later) :]:
        assert_trained(ours, theirs, whole=ours is trained[0], **CLOSE)
    assert len(trained[1].losses) == LAST - MIDDLE
    assert not job.warnings


@promise("a torn step made again")
@pytest.mark.parametrize("step", [1, MIDDLE, LAST])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_step_in_which_a_worker_is_lost_is_made_by_those_that_are_left(bench, workers, step):
    said, trained, job = bench(Script(), workers, {(1, step): "lost"})
    assert [type(each) for each in said] == [type(None), Lost, type(None)][:workers]
    theirs = bench.alone(Script())
    for ours in (trained[0], *trained[2:]):
        assert_trained(ours, theirs, **CLOSE)
    assert not job.warnings


@promise("torn draws")
def test_a_torn_step_draws_the_same_numbers_and_leaves_those_of_the_script(bench):
    """By which the order of the second epoch is drawn."""
    script = Script(shuffle=True, dropout=0.3, draws=True)
    _, whole, _ = bench(script, 2)
    said, torn, _ = bench(script, 2, {(0, 3): "torn"})
    assert said == (None, None)
    for ours, theirs in zip(torn, whole, strict=True):
        assert_trained(ours, theirs, **CLOSE)
        assert ours.drawn == theirs.drawn


@promise("behind in a step")
@pytest.mark.parametrize("step", [MIDDLE, LAST])
def test_a_worker_whose_step_the_others_have_made_takes_their_state(bench, step):
    said, trained, job = bench(Script(), 2, {(1, step): "behind"})
    assert said == (None, None)
    theirs = bench.alone(Script())
    assert_trained(trained[0], theirs, **CLOSE)
    assert len(trained[1].losses) == LAST - (not getattr(bench.kind, "hears_of_all", False))
    for mine, its in zip(trained[1].weights, trained[0].weights, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert not job.warnings


@promise("kept state")
@pytest.mark.parametrize("step", [2, STEPS, MIDDLE])
def test_the_next_job_goes_on_where_one_was_stopped(bench, step, tmp_path):
    """To the bit."""
    script = Script(shuffle=True, dropout=0.3)
    _, (whole,), _ = bench(script)
    (said,), _, _ = bench(script, events={(0, step): "stopped"}, kept=tmp_path)
    assert isinstance(said, SystemExit)
    assert [path.name for path in tmp_path.iterdir()] == [f"stopped-{step:010}.state"]
    (said,), (later,), job = bench(script, kept=tmp_path)
    assert said is None
    assert [told["step"] for told in job.lines[0].notices("resumed")] == [step]
    assert len(later.losses) == LAST - step
    assert_trained(later, whole, whole=False, **TO_THE_BIT)


@promise("kept state")
def test_all_stop_after_the_same_step_and_one_keeps_the_state(bench, tmp_path):
    said, trained, job = bench(Script(), 2, {(1, MIDDLE): "stopped"}, kept=tmp_path)
    assert [type(each) for each in said] == [SystemExit] * 2
    assert [len(each.losses) for each in trained] == [MIDDLE] * 2
    assert [path.name for path in tmp_path.iterdir()] == [f"stopped-{MIDDLE:010}.state"]
    assert sum(len(line.notices("checkpoint")) for line in job.lines.values()) == 1


@promise("a wish to stop")
@pytest.mark.parametrize("leaves", [0, 1])
def test_who_is_told_to_leave_leaves_after_its_step_and_the_others_go_on(bench, leaves):
    said, trained, job = bench(Script(), 2, {(leaves, MIDDLE): "drained"})
    assert isinstance(said[leaves], SystemExit)
    assert said[1 - leaves] is None
    assert len(trained[leaves].losses) == MIDDLE
    assert_trained(trained[1 - leaves], bench.alone(Script()), **CLOSE)
    assert not job.warnings


@promise("refused alone")
def test_what_is_refused_is_refused_by_all_in_one_line_also_alone(bench):
    assert bench.kind.refusals
    for each in bench.kind.refusals:
        for workers in each.workers:
            job = bench.make_job(workers)
            made = [each.make() for _ in range(workers)]
            said, _ = job.run(lambda rank, job=job, made=made: made[rank](job))
            for error in said:
                require_refusal(error, each.words, (each.what, workers))


def test_what_a_front_end_lacks_is_a_promise_of_the_others():
    for each in FRONT_ENDS.values():
        assert {*each.lacks} <= {*PROMISES}
        assert all(each.lacks.values())
