"""What of Horovod's own is mended for Keras 3, TensorFlow and PyTorch's optimizers, its callbacks among them."""

import importlib.util
from types import SimpleNamespace

import pytest

from elasticdl.common.errors import UserError
from elasticdl.elastic.horovod_scripts.patches import (
    mend_gradient_tape,
    mend_keras_state,
    mend_optimizer_state,
    mend_tensorflow_state,
    refuse_optimizer,
    restore_lr,
)

import elasticdl.elastic.keras.tensorflow_adapter  # noqa: F401 - before Keras  # isort: skip
import keras
import numpy as np
import tensorflow as tf

from elasticdl.elastic.horovod_scripts.patches import mend_callbacks


def fresh(name):
    """A module of Horovod's, of its own for each test that mends it."""
    pytest.importorskip("horovod.tensorflow")
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sent = []
    return module


def test_the_gradient_tape_takes_variables_of_keras_3_and_all_that_it_took():
    taken = []
    tape_class = type("_DistributedGradientTape", (), {"gradient": lambda tape, target, sources: taken.extend(sources)})
    mend_gradient_tape(SimpleNamespace(_DistributedGradientTape=tape_class))
    wrapped, own, tensor = keras.Variable(1.0), tf.Variable(2.0), tf.constant(3.0)
    tape_class().gradient("loss", [wrapped, own, tensor])
    assert [id(each) for each in taken] == [id(each) for each in (wrapped.value, own, tensor)]


def test_an_optimizer_that_would_not_average_is_refused():
    module = SimpleNamespace(create_distributed_optimizer=lambda keras, optimizer: "distributed")
    refuse_optimizer(module)
    assert module.create_distributed_optimizer(None, SimpleNamespace(variables=list)) == "distributed"
    with pytest.raises(UserError, match="DistributedGradientTape"):
        module.create_distributed_optimizer(None, SimpleNamespace(variables=[]))


@pytest.fixture
def _lr_is_gone_again():
    yield
    if "lr" in vars(keras.optimizers.Optimizer):
        del keras.optimizers.Optimizer.lr


@pytest.mark.usefixtures("_lr_is_gone_again")
def test_the_rate_of_an_optimizer_of_keras_3_goes_by_its_old_name_too():
    optimizer = keras.optimizers.SGD(0.5)
    restore_lr(keras)
    optimizer.lr.assign(0.25)
    assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
    optimizer.lr = 0.125
    assert float(optimizer.learning_rate) == 0.125


@pytest.fixture
def states():
    """Horovod's states for TensorFlow, mended, of a worker that is rank 0, and what it sends."""
    module = fresh("horovod.tensorflow.elastic")
    module.rank, module.broadcast_object = lambda: 0, lambda value: value
    module.broadcast_variables = lambda variables, root_rank: module.sent.append([v.numpy().item() for v in variables])
    mend_keras_state(module)
    mend_tensorflow_state(module)
    return module


def state_of(states, optimizer):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return states.TensorFlowKerasState(keras.Sequential([keras.Input((1,)), layer]), optimizer)


def test_an_optimizer_of_keras_3_is_built_saved_restored_and_sent(states):
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    state = state_of(states, optimizer)
    assert optimizer.built, "else a newcomer has other variables than the rest"
    state.model.weights[0].assign([[10.0]])
    optimizer.momentums[0].assign([[20.0]])
    state._bcast_model()
    state.restore()
    state._bcast_model()
    assert [(sent[0], sent[-1]) for sent in states.sent] == [(10, 20), (1, 0)]


def test_an_older_one_is_left_to_horovod(states):
    state = state_of(states, SimpleNamespace(variables=list))
    state._bcast_model()
    assert (state._saved_optimizer_state, states.sent) == ([], [[1], []])


def test_variables_without_a_session_are_sent_at_each_sync_and_not_when_the_state_is_made(states):
    state = states.TensorFlowState([keras.Variable(1.0), tf.Variable(2.0)], batch=3)
    assert (states.sent, state.batch, state._values) == ([], 3, [1, 2])
    state.variables[1].assign(4.0)
    state.sync()
    assert (states.sent, state._values) == ([[1, 4]], [1, 4])


class TestOptimizers:
    """What a newcomer is sent of rank 0's optimizer; Horovod's own handlers, and a wire of lists."""

    def handlers(self, monkeypatch, takes_part=True):
        state = pytest.importorskip("horovod.torch.elastic.state")
        wire, registry = [], []

        def broadcast_object(value, root_rank, name=None):
            wire.extend([value] if state.rank() == root_rank else [])
            return wire.pop(0) if state.rank() != root_rank else value

        def broadcast_parameters(named, root_rank):
            for _, tensor in named:
                if state.rank() == root_rank:
                    wire.append(tensor.clone())
                else:
                    tensor.copy_(wire.pop(0))

        for function in (broadcast_object, broadcast_parameters):
            monkeypatch.setattr(state, function.__name__, function)
        monkeypatch.setattr(
            state, "broadcast_optimizer_state", lambda optimizer, root_rank: wire.append("Horovod's own")
        )
        monkeypatch.setattr(state, "set_handler_registry", registry.extend)
        mend_optimizer_state(state, lambda: takes_part)
        return state, next(its for kind, its in registry if kind is state.torch.optim.Optimizer), wire

    def optimizer(self, torch, name, rate, steps):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.ones(3))
        options = {"SGD": {"weight_decay": 0.1}, "AdamW": {"weight_decay": 0.1}, "momentum": {"momentum": 0.9}}[name]
        made = getattr(torch.optim, "AdamW" if name == "AdamW" else "SGD")([parameter], lr=rate, **options)
        for _ in range(steps):
            parameter.grad = torch.ones(3)
            made.step()
        return made

    @pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
    def test_a_newcomer_has_the_whole_optimizer_and_its_weights_stay(self, monkeypatch, name):
        state, handler, wire = self.handlers(monkeypatch)
        root, newcomer = self.optimizer(state.torch, name, 0.1, 2), self.optimizer(state.torch, name, 0.3, 0)
        (group,) = newcomer.param_groups  # which a scheduler may hold
        for rank, optimizer in enumerate((root, newcomer)):
            monkeypatch.setattr(state, "rank", lambda rank=rank: rank)
            handler(optimizer).sync()
        assert wire == []
        assert newcomer.param_groups == [group]
        assert newcomer.param_groups[0] is group
        assert group["lr"] == 0.1
        assert state.torch.equal(newcomer.param_groups[0]["params"][0], state.torch.ones(3))
        (theirs,), (ours,) = (
            root.state_dict()["state"].values() or [{}],
            newcomer.state_dict()["state"].values() or [{}],
        )
        state.torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def test_a_step_that_is_torn_leaves_the_groups_to_those_who_hold_them(self, monkeypatch):
        state, handler, _ = self.handlers(monkeypatch)
        optimizer = self.optimizer(state.torch, "AdamW", 0.1, 1)
        (group,) = optimizer.param_groups
        kept = handler(optimizer)
        group["lr"] = 0.7
        kept.restore()
        assert optimizer.param_groups[0] is group
        assert group["lr"] == 0.1

    def test_a_script_that_takes_no_part_has_horovods_own(self, monkeypatch):
        state, handler, wire = self.handlers(monkeypatch, takes_part=False)
        handler(self.optimizer(state.torch, "SGD", 0.1, 0)).sync()
        assert wire == ["Horovod's own"]


@pytest.fixture
def callbacks(_lr_is_gone_again):
    """Horovod's module, mended, with two workers of which the other one has what this one has, and 1 more."""
    module = fresh("horovod._keras.callbacks")
    module.hvd = SimpleNamespace(
        size=lambda: 2,
        rank=lambda: 0,
        _executing_eagerly=lambda: True,
        allreduce=lambda tensor: tensor + 0.5,
        broadcast_variables=lambda variables, root_rank: module.sent.append((variables, root_rank)),
    )
    mend_callbacks(module)
    return module


def of_keras_3(impl):
    return type(impl.__name__.removesuffix("Impl"), (impl, keras.callbacks.Callback), {})


def fit_with(callback, epochs=2, optimizer=None, after=()):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    x = np.ones((8, 2), "float32")
    return model, model.fit(x, x[:, :1], 4, epochs, 0, [callback, *after])


def test_variables_of_model_and_optimizer_are_sent_once(callbacks):
    model, _ = fit_with(of_keras_3(callbacks.BroadcastGlobalVariablesCallbackImpl)(keras.backend, 0))
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
    fit_with(group.callbacks[0], epochs=1, after=[average, after])
    assert seen[0] == pytest.approx(seen[1])


def test_the_rate_is_raised_to_that_of_all_workers(callbacks):
    kind = of_keras_3(callbacks.LearningRateWarmupCallbackImpl)
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(watch.model.optimizer.learning_rate))
    )
    _, history = fit_with(kind(keras.backend, 0.5, warmup_epochs=2), after=[watch], epochs=3)
    assert rates[:4] == pytest.approx([0.5 / 2 * (1 + done / 4) for done in (1, 2, 3, 4)])
    assert history.history["lr"][-1] == pytest.approx(0.5)


def test_momentum_that_can_not_be_corrected_is_refused_before_anything_is_trained(callbacks):
    kind = of_keras_3(callbacks.LearningRateScheduleCallbackImpl)
    momentum = keras.optimizers.SGD(0.5, momentum=0.9)
    with pytest.raises(UserError, match="give the callback momentum_correction=False") as error:
        fit_with(kind(keras.backend, 0.5, 0.5), optimizer=momentum)
    assert "\n" not in str(error.value)
    assert int(momentum.iterations) == 0
    model, _ = fit_with(
        kind(keras.backend, 0.5, 0.5, momentum_correction=False), optimizer=keras.optimizers.SGD(0.5, momentum=0.9)
    )
    assert float(model.optimizer.learning_rate) == 0.25
