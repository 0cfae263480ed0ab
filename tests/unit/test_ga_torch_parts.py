"""What else knows an optimizer of torch's knows one that accumulates: schedulers, hooks, states, copies, ``torch.compile``."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from refusal_kit import refused
from test_ga_torch import (
    STEPS,
    adam,
    flat,
    make_batches,
    make_model,
    ours,
    plain,
    same,
    scaler_of,
    train,
    train_big,
)
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

from elasticdl.common.errors import ArgumentError
from elasticdl.ga.torch import optim


@pytest.fixture(scope="module")
def wanted():
    return plain(make_batches())


# Schedulers, groups, hooks


@pytest.mark.parametrize("way", ["if stepped", "hook", "of the wrapped"])
def test_schedulers_count_optimizer_steps(way):
    theirs, (model, optimizer) = make_model(), ours()
    plain_optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    wanted, scheduler = (
        StepLR(each, 2, 0.5)
        for each in (plain_optimizer, optimizer.optimizer if way == "of the wrapped" else optimizer)
    )
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro_batches in make_batches():
            train_big(theirs, plain_optimizer, [micro_batches])
            for micro_batch in micro_batches:
                train(model, optimizer, [micro_batch])
                if way != "hook" and optimizer.stepped:
                    scheduler.step()
            wanted.step()
            assert scheduler.get_last_lr() == wanted.get_last_lr()
    assert same(model, theirs)


def test_a_scheduler_stepped_with_every_micro_batch_is_warned_of():
    model, optimizer = ours()
    scheduler = StepLR(optimizer, 1, 0.5)
    first, second = make_batches()[0][:2]
    train(model, optimizer, [first])
    scheduler.step()
    with pytest.warns(UserWarning, match=r"only `if optimizer\.stepped`"):
        train(model, optimizer, [second])


def test_parameter_groups():
    theirs, model = make_model(), make_model()
    plain_optimizer = torch.optim.SGD([{"params": theirs[0].parameters(), "lr": 0.3}], lr=1.0)
    optimizer = optim.SGD([{"params": model[0].parameters(), "lr": 0.3}], lr=1.0, steps=STEPS)
    for update, micro_batches in enumerate(make_batches()):
        train_big(theirs, plain_optimizer, [micro_batches])
        train(model, optimizer, micro_batches)
        for each, of in ((plain_optimizer, theirs), (optimizer, model)):
            if update == 0:
                each.add_param_group({"params": of[2].parameters(), "lr": 0.03})
                of.zero_grad()
            for group in each.param_groups:
                group["lr"] *= 0.9
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain_optimizer.param_groups]
    assert same(model, theirs)


def test_it_is_torchs_kind_of_optimizer():
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.2)
    inner.eval = lambda: "of the wrapped one"
    optimizer = optim.Optimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optim.AdamW(2, model.parameters()), optim.Optimizer)
    assert (optimizer.param_groups is inner.param_groups, optimizer.state is inner.state) == (True, True)
    assert optimizer.defaults["lr"] == 0.2
    assert optimizer.eval() == "of the wrapped one"
    assert repr(optimizer).startswith("Optimizer (steps=2) of AdamW")
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = optimizer.nothing_such


# State


def saved(value):
    """Through a file as a checkpoint would be, loaded without trust."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("taken", [0, 2])
def test_going_on_from_a_saved_state_also_in_the_middle(taken, wanted):
    stream = flat(make_batches())
    (first, optimizer), second = ours(), make_model()
    train(first, optimizer, stream[: STEPS + taken])
    assert ("accumulation" in optimizer.state_dict()) == (taken > 0)
    other = optim.Optimizer(torch.optim.Adam(second.parameters(), lr=9.9), steps=STEPS)
    second.load_state_dict(saved(first.state_dict()))
    other.load_state_dict(saved(optimizer.state_dict()))
    train(first, optimizer, stream[STEPS + taken :])
    train(second, other, stream[STEPS + taken :])
    assert same(second, first, 0.0)
    assert same(second, wanted)


def test_a_loaded_state_does_not_bring_its_steps():
    stream = flat(make_batches((2,) * 6, updates=1))
    (first, optimizer), (second, other) = ours(4), ours(2)
    train(first, optimizer, stream[:3])
    other.load_state_dict(saved(optimizer.state_dict()))
    assert (other.steps, other.will_step) == (2, True)
    train(second, other, stream[3:])  # the first completes four, the others are two
    assert same(second, plain([stream[:4], stream[4:]]))


def test_states_are_exchanged_with_torch():
    (model, optimizer), theirs = ours(), make_model()
    plain_optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    train(model, optimizer, make_batches()[0] + make_batches()[1][:1])
    plain_optimizer.load_state_dict(saved(optimizer.state_dict()))
    theirs.load_state_dict(model.state_dict())
    train_big(theirs, plain_optimizer, make_batches()[1:])
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))  # drops the micro-batch that was taken
    model.load_state_dict(theirs.state_dict())
    train(model, optimizer, flat(make_batches()))
    train_big(theirs, plain_optimizer, make_batches())
    assert same(model, theirs)


def test_an_overflow_is_remembered_in_the_state():
    (model, optimizer), scaler = ours(2), scaler_of()
    inputs, labels = make_batches()[0][0]
    scaler.scale(mse_loss(model(inputs), labels) * float("inf")).backward()
    scaler.step(optimizer)
    other = adam(model, 2)
    other.load_state_dict(saved(optimizer.state_dict()))
    train(model, other, [(inputs, labels)])
    assert not other.stepped
    assert same(model, make_model(), 0.0)


@pytest.mark.parametrize(
    "state",
    [{"a": 1}, None, {"param_groups": 5, "state": {}}, "accumulation"],
    ids=["other keys", "None", "wrong groups", "wrong accumulation"],
)
def test_what_is_no_state_is_told_in_one_line_and_nothing_is_lost(state, wanted):
    (model, optimizer), stream = ours(), flat(make_batches())
    train(model, optimizer, stream[:2])
    if state == "accumulation":
        state = {**optimizer.state_dict(), "accumulation": {"count": 1}}
    words = r"load_state_dict\(\): .*give what state_dict\(\) returned"
    refused(words, lambda: optimizer.load_state_dict(state), ArgumentError)
    with pytest.raises(ValueError, match="parameter group"):  # torch's own, where the parameters are others
        optimizer.load_state_dict(torch.optim.Adam([torch.ones(1)]).state_dict())
    train(model, optimizer, stream[2:])
    assert same(model, wanted)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize(
    "make", [adam, lambda model: optim.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1), STEPS)]
)
def test_copies_go_on_by_themselves(make, duplicate, wanted):
    stream = flat(make_batches())
    model = make_model()
    optimizer = make(model)
    StepLR(optimizer, 100)  # torch then keeps a function in the optimizer
    train(model, optimizer, stream[:5])
    other_model, other = duplicate((model, optimizer))
    assert type(other) is type(optimizer)
    train(other_model, other, stream[5:])
    assert not same(model, wanted), "the original stands where it stood"
    assert same(other_model, wanted)
    assert same(train(model, optimizer, stream[5:]), wanted)


# torch.compile


@pytest.mark.parametrize(("what", "graphs"), [("model", 1), ("wrapped step", 1), ("whole loop body", 1)])
def test_compiled(what, graphs):
    def body(inputs, labels):
        optimizer.zero_grad()
        mse_loss(run(inputs), labels).backward()
        step()

    torch._dynamo.reset()
    count = CompileCounter()
    theirs, (model, optimizer) = make_model(), ours()
    plain_optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    run, step = model, optimizer.step
    if what == "wrapped step":  # torch's compiled Adam counts in single precision, so it is not quite the other
        plain_optimizer.step = torch.compile(plain_optimizer.step, backend="eager")
    if what == "model":
        run = torch.compile(model, backend=count)
    elif what == "wrapped step":
        optimizer.optimizer.step = torch.compile(optimizer.optimizer.step, backend=count)
    else:
        body = torch.compile(body, backend=count)
    for inputs, labels in flat(make_batches()):
        body(inputs, labels)
    assert same(model, train_big(theirs, plain_optimizer, make_batches()))
    torch._dynamo.reset()
    assert count.frame_count == graphs, "compiled once, whatever the count of micro-batches"
