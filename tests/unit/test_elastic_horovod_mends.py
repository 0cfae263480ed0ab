"""What of Horovod's own is mended for TensorFlow and PyTorch's optimizers, and what is refused."""

import importlib.util
from types import SimpleNamespace

import pytest
from refusal_kit import refused

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
    make = module.create_distributed_optimizer
    assert make(None, SimpleNamespace(variables=list)) == "distributed"
    refused(r"use elasticdl\.elastic\.keras, or Keras 2", lambda: make(None, SimpleNamespace(variables=[])))


def test_callbacks_take_the_backend_of_the_keras_that_tensorflow_has():
    callbacks = SimpleNamespace(keras=SimpleNamespace(backend="backend of Keras 2"), K="backend of Keras 3")
    mend_keras_callbacks(callbacks)
    assert callbacks.K == "backend of Keras 2"


def test_variables_without_a_session_are_sent_at_each_sync_and_not_when_the_state_is_made():
    pytest.importorskip("horovod.tensorflow")
    spec = importlib.util.find_spec("horovod.tensorflow.elastic")
    states, sent = importlib.util.module_from_spec(spec), []  # a module of this test's own
    spec.loader.exec_module(states)
    states.rank, states.broadcast_object = lambda: 0, lambda value: value
    states.broadcast_variables = lambda variables, root_rank: sent.append([v.numpy().item() for v in variables])
    mend_tensorflow_state(states)
    state = states.TensorFlowState([states.tf.Variable(1.0), states.tf.Variable(2.0)], batch=3)
    assert (sent, state.batch) == ([], 3)
    state.variables[1].assign(4.0)
    state.sync()
    state.variables[1].assign(7.0)
    state.restore()
    assert (sent, state.variables[1].numpy()) == ([[1, 4]], 4.0)


@pytest.fixture
def handlers(monkeypatch):
    """``handlers(takes_part)``: Horovod's module, its handler of optimizers as we mend it, and a wire of lists."""

    def make(takes_part=True):
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

        for name, function in {
            "broadcast_object": broadcast_object,
            "broadcast_parameters": broadcast_parameters,
            "broadcast_optimizer_state": lambda optimizer, root_rank: wire.append("Horovod's own"),
            "set_handler_registry": registry.extend,
        }.items():
            monkeypatch.setattr(state, name, function)
        mend_optimizer_state(state, lambda: takes_part)
        return state, next(its for kind, its in registry if kind is state.torch.optim.Optimizer), wire

    return make


def optimizer(torch, kind, rate, steps):
    parameter = torch.nn.Parameter(torch.ones(3))
    made = getattr(torch.optim, kind)([parameter], lr=rate, weight_decay=0.1)
    for _ in range(steps):
        parameter.grad = torch.ones(3)
        made.step()
    return made


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_newcomer_has_the_whole_optimizer_and_its_weights_and_groups_stay(handlers, monkeypatch, kind):
    state, handler, wire = handlers()
    root, newcomer = optimizer(state.torch, kind, 0.1, 2), optimizer(state.torch, kind, 0.3, 0)
    (group,) = newcomer.param_groups  # which a scheduler may hold
    for rank, each in enumerate((root, newcomer)):
        monkeypatch.setattr(state, "rank", lambda rank=rank: rank)
        handler(each).sync()
    assert wire == []
    assert newcomer.param_groups[0] is group
    assert group["lr"] == 0.1
    assert group["params"][0].tolist() == [1.0] * 3
    state.torch.testing.assert_close(newcomer.state_dict()["state"], root.state_dict()["state"], rtol=0, atol=0)
    kept = handler(newcomer)
    group["lr"] = 0.7
    kept.restore()  # as of a torn step
    assert newcomer.param_groups[0] is group
    assert group["lr"] == 0.1


def test_a_script_that_takes_no_part_has_horovods_own(handlers):
    state, handler, wire = handlers(takes_part=False)
    handler(optimizer(state.torch, "SGD", 0.1, 0)).sync()
    assert wire == ["Horovod's own"]
