"""What of Horovod's own is mended for TensorFlow and PyTorch's optimizers, and what is refused."""

import importlib.util
from types import SimpleNamespace

import pytest

from elasticdl.common.errors import UserError
from elasticdl.elastic.horovod_scripts.patches import (
    mend_keras_callbacks,
    mend_optimizer_state,
    mend_tensorflow_state,
    refuse_optimizer,
)
from elasticdl.triton_first import import_triton

import_triton()  # TensorFlow is imported before PyTorch here


def test_an_optimizer_that_would_not_average_is_refused():
    module = SimpleNamespace(create_distributed_optimizer=lambda keras, optimizer: "distributed")
    refuse_optimizer(module)
    assert module.create_distributed_optimizer(None, SimpleNamespace(variables=list)) == "distributed"
    with pytest.raises(UserError, match=r"use elasticdl\.elastic\.keras, or Keras 2"):
        module.create_distributed_optimizer(None, SimpleNamespace(variables=[]))


def test_callbacks_take_the_backend_of_the_keras_that_tensorflow_has():
    keras_2 = SimpleNamespace(backend="backend of Keras 2")
    callbacks = SimpleNamespace(keras=keras_2, K="backend of Keras 3")
    mend_keras_callbacks(callbacks)
    assert keras_2.backend == callbacks.K


@pytest.fixture
def states():
    """Horovod's states for TensorFlow, mended in a module of this test's own, of a worker that is rank 0; and what it sends."""
    pytest.importorskip("horovod.tensorflow")
    spec = importlib.util.find_spec("horovod.tensorflow.elastic")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sent = []
    module.rank, module.broadcast_object = lambda: 0, lambda value: value
    module.broadcast_variables = lambda variables, root_rank: module.sent.append([v.numpy().item() for v in variables])
    mend_tensorflow_state(module)
    return module


def test_variables_without_a_session_are_sent_at_each_sync_and_not_when_the_state_is_made(states):
    tf = states.tf
    state = states.TensorFlowState([tf.Variable(1.0), tf.Variable(2.0)], batch=3)
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
