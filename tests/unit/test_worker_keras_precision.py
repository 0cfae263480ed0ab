"""Mixed precision: the loss is scaled as ``compile`` does it, and a step that overflows is skipped by all or by none."""

import elastic_keras_kit
import numpy as np
import pytest
from elastic_keras_kit import Board, Trainee, run_all
from worker_keras_kit import make_job, spec_maker

import keras  # isort: skip

from elasticdl.elastic.core.plan import BatchPolicy


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy(before)


def trainees(workers, initial_scale):
    board = Board(workers)

    def make(rank):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale, 5)
        return Trainee(rank, board, BatchPolicy(16, None, None), elastic_keras_kit.make_model(), optimizer)

    members = [make(rank) for rank in range(workers)]
    run_all(members, lambda member: member.train(epochs=6))
    return members


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_a_step_that_overflows_is_skipped_by_all_members(policy):
    one, other = trainees(2, 2.0**24)  # no gradient in half precision of a loss that is scaled by so much is finite
    assert one.state.step == 24
    assert 0 < int(one.optimizer.iterations) < 24
    assert all(map(np.array_equal, one.weights(), other.weights()))
    assert all(np.isfinite(value).all() for value in one.weights())
    assert not np.array_equal(one.model.get_weights()[0], elastic_keras_kit.make_model().get_weights()[0])


def test_the_number_of_members_shows_only_as_rounding_does(policy):
    alone, (member, _) = trainees(1, 2.0**10)[0], trainees(2, 2.0**10)
    assert int(alone.optimizer.iterations) == int(member.optimizer.iterations) == 24
    np.testing.assert_allclose(alone.losses, member.losses, rtol=0.02)
    assert alone.model.compute_dtype == policy.removeprefix("mixed_")


def test_a_module_that_sets_a_policy_is_trained_with_it(policy, tmp_path, monkeypatch):
    spec = spec_maker(tmp_path, monkeypatch)(f"\nkeras.mixed_precision.set_global_policy({policy!r})\n")

    def trained(**options):
        job = make_job(spec.model_copy(update=options))
        job.trainer.run()
        return job

    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    job = trained(num_epochs=2, output=str(tmp_path / "out"), **kept)
    optimizer = job.learner.state.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert [report.learning_rate for report in job.script.reports] == pytest.approx([0.1] * 8)
    assert all(np.isfinite(report.loss) for report in job.script.reports)
    assert keras.models.load_model(tmp_path / "out" / "model.keras").compute_dtype == policy.removeprefix("mixed_")
    resumed, whole = trained(**kept), trained()
    assert resumed.script.notices("resumed")[0]["step"] == 8
    ours, theirs = (each.learner.state.optimizer.variables for each in (resumed, whole))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)  # the scale's own state among them
