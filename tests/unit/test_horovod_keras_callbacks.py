"""Horovod's callbacks for Keras run under Keras 3, as far as Keras 3 lets them."""

import importlib.util
from types import SimpleNamespace

import elasticdl.elastic.keras.backend  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import pytest

from elasticdl.common.errors import UserError
from elasticdl.elastic.horovod_scripts.keras_callbacks import mend_callbacks

pytest.importorskip("horovod.tensorflow")


@pytest.fixture
def callbacks():
    """Horovod's module, mended, with two workers of which the other one has what this one has, and 1 more."""
    spec = importlib.util.find_spec("horovod._keras.callbacks")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sent = []
    module.hvd = SimpleNamespace(
        size=lambda: 2,
        rank=lambda: 0,
        _executing_eagerly=lambda: True,
        allreduce=lambda tensor: tensor + 0.5,
        broadcast_variables=lambda variables, root_rank: module.sent.append((variables, root_rank)),
    )
    mend_callbacks(module)
    yield module
    if "lr" in vars(keras.optimizers.Optimizer):
        del keras.optimizers.Optimizer.lr


def of_keras_3(impl):
    return type(impl.__name__.removesuffix("Impl"), (impl, keras.callbacks.Callback), {})


def fit(callback, epochs=2, optimizer=None, after=()):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    x = np.ones((8, 2), "float32")
    return model, model.fit(x, x[:, :1], 4, epochs, 0, [callback, *after])


def test_variables_of_model_and_optimizer_are_sent_once(callbacks):
    model, _ = fit(of_keras_3(callbacks.BroadcastGlobalVariablesCallbackImpl)(keras.backend, 0))
    ((variables, root),) = callbacks.sent
    assert root == 0
    assert [variable.shape.as_list() for variable in variables][:2] == [[2, 1], [1]]
    assert len(variables) == len(model.weights) + len(model.optimizer.variables)


def test_metrics_are_averaged_for_the_callbacks_that_follow(callbacks):
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    before = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"] + 0.5))
    average = of_keras_3(callbacks.MetricAverageCallbackImpl)(keras.backend)
    group = keras.callbacks.CallbackList([before, average])
    fit(group.callbacks[0], epochs=1, after=[average, after])
    assert seen[0] == pytest.approx(seen[1])


def test_the_rate_is_raised_to_that_of_all_workers(callbacks):
    kind = of_keras_3(callbacks.LearningRateWarmupCallbackImpl)
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(watch.model.optimizer.learning_rate))
    )
    _, history = fit(kind(keras.backend, 0.5, warmup_epochs=2), after=[watch], epochs=3)
    assert rates[:4] == pytest.approx([0.5 / 2 * (1 + done / 4) for done in (1, 2, 3, 4)])
    assert history.history["lr"][-1] == pytest.approx(0.5)


def test_momentum_that_can_not_be_corrected_is_refused_before_anything_is_trained(callbacks):
    kind = of_keras_3(callbacks.LearningRateScheduleCallbackImpl)
    momentum = keras.optimizers.SGD(0.5, momentum=0.9)
    with pytest.raises(UserError, match="give the callback momentum_correction=False") as error:
        fit(kind(keras.backend, 0.5, 0.5), optimizer=momentum)
    assert "\n" not in str(error.value)
    assert int(momentum.iterations) == 0
    model, _ = fit(
        kind(keras.backend, 0.5, 0.5, momentum_correction=False), optimizer=keras.optimizers.SGD(0.5, momentum=0.9)
    )
    assert float(model.optimizer.learning_rate) == 0.25
