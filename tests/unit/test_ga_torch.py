"""Accumulated micro-batches against the one big batch that torch itself is given."""

import copy
import io
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticdl.common.errors import UserError
from elasticdl.ga.torch import optim

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(set(optim.__all__) - {"Optimizer"})
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
STEPS, UPDATES = 3, 4


def make_model(dtype=torch.float64, sparse=False):
    torch.manual_seed(0)
    if sparse:
        return torch.nn.Embedding(12, 4, sparse=True, dtype=dtype)
    # No biases: Muon takes matrices only.
    linear = [torch.nn.Linear(size, 4, bias=False, dtype=dtype) for size in (6, 4)]
    return torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])


def make_batches(sizes=(4, 4, 4), dtype=torch.float64, sparse=False, updates=UPDATES):
    """For each update one list of micro-batches."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(updates):
        inputs = torch.randn(sum(sizes), 6, generator=generator, dtype=dtype)
        labels = torch.randn(sum(sizes), 4, generator=generator, dtype=dtype)
        if sparse:
            inputs = torch.randint(0, 12, (sum(sizes),), generator=generator)
        batches.append(list(zip(inputs.split(sizes), labels.split(sizes), strict=True)))
    return batches


def backward(model, inputs, labels):
    loss = mse_loss(model(inputs), labels)
    loss.backward()
    return loss


def flat(batches):
    return [micro_batch for micro_batches in batches for micro_batch in micro_batches]


def big(micro_batches):
    return [torch.cat(part) for part in zip(*micro_batches, strict=True)]


def train_big(model, optimizer, batches, before_step=lambda: None):
    """What is wanted: torch alone, whole batches."""
    for micro_batches in batches:
        optimizer.zero_grad()
        backward(model, *big(micro_batches))
        before_step()
        optimizer.step()
    return model


def train(model, optimizer, batches, samples=False):
    for inputs, labels in flat(batches):
        optimizer.zero_grad()
        backward(model, inputs, labels)
        optimizer.step(samples=len(inputs) if samples else None)
    return model


def difference(model, wanted):
    """The largest of all parameters, relative to the parameter."""
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)


def same(model, wanted, tolerance=1e-12):
    return difference(model, wanted) <= tolerance


def adam(model, steps=STEPS, **kwargs):
    return optim.Adam(steps, model.parameters(), lr=0.1, **kwargs)


@pytest.fixture(scope="module")
def wanted():
    """The model that Adam gives on the whole batches."""
    model = make_model()
    return train_big(model, torch.optim.Adam(model.parameters(), lr=0.1), make_batches())


# The numbers


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHIPPED)
def test_micro_batches_give_what_one_big_batch_gives(name, dtype, sizes):
    sparse = name == "SparseAdam"
    batches = make_batches(sizes, dtype, sparse)
    theirs, ours = make_model(dtype, sparse), make_model(dtype, sparse)
    train_big(theirs, getattr(torch.optim, name)(theirs.parameters()), batches)
    train(ours, getattr(optim, name)(STEPS, ours.parameters()), batches, samples=sizes[0] != sizes[-1])
    assert difference(make_model(dtype, sparse), theirs) > 1e-4, "trained at all"
    assert same(ours, theirs, TOLERANCE[dtype])


def test_every_optimizer_of_torch_is_there_but_lbfgs():
    theirs = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert set(optim.__all__) == theirs - {"LBFGS"}


def test_unequal_micro_batches_without_their_sizes_weigh_the_same():
    sizes = (5, 5, 2)
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for micro_batches in make_batches(sizes):
        optimizer.zero_grad()
        (sum(mse_loss(plain(inputs), labels) for inputs, labels in micro_batches) / len(sizes)).backward()
        optimizer.step()
    model = make_model()
    train(model, optim.SGD(STEPS, model.parameters(), lr=0.1), make_batches(sizes))
    assert same(model, plain)


def test_parameters_without_gradient_in_some_or_all_micro_batches():
    def run(make, batches):
        weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3)]
        optimizer = make(weights)
        for used in batches:
            optimizer.zero_grad()
            (sum(sum(weights[i].square().sum() for i in indices) for indices in used) / len(used)).backward()
            optimizer.step()
        return torch.stack(weights)

    options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    ours = run(lambda weights: optim.SGD(2, weights, **options), [[[0]], [[0, 1]]] * 3)
    theirs = run(lambda weights: torch.optim.SGD(weights, **options), [[[0], [0, 1]]] * 3)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert (ours[2] == 1).all(), "no gradient at all: not even weight decay"


def test_half_precision_is_summed_in_single():
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    optimizer = optim.SGD(1000, [weight], lr=1.0)
    for _ in range(1000):  # in bfloat16 the sum would stop growing at 256
        weight.backward()
        optimizer.step()
    assert weight.item() == -1.0


def test_gradients_in_memory_that_is_used_again():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer, bucket = optim.SGD(2, [weight], lr=1.0), torch.empty(5, dtype=torch.float64)
    for value in (1.0, 3.0):
        bucket.fill_(value)
        weight.grad = bucket[1:4]
        optimizer.step()
    assert weight.tolist() == [-2.0] * 3


# zero_grad


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["before forward", "before backward", "after step", "of the model", "none"])
def test_zero_grad_in_every_usual_place(place, set_to_none, wanted):
    model = make_model()
    optimizer = adam(model)
    zero = {place: lambda: optimizer.zero_grad(set_to_none), "of the model": lambda: model.zero_grad(set_to_none)}
    nothing = lambda: None  # noqa: E731
    for inputs, labels in flat(make_batches()):
        zero.get("before forward", nothing)()
        loss = mse_loss(model(inputs), labels)
        zero.get("before backward", nothing)()
        loss.backward()
        optimizer.step()
        zero.get("after step", nothing)()
        if place == "of the model":
            zero[place]()
    assert same(model, wanted)


def test_gradients_are_gone_after_every_step():
    model = make_model()
    optimizer = adam(model, 2)
    for inputs, labels in make_batches()[0][:2]:
        backward(model, inputs, labels)
        optimizer.step()
        assert all(weight.grad is None for weight in model.parameters())


def test_a_micro_batch_cleared_before_its_step_does_not_count(wanted):
    model = make_model()
    optimizer = adam(model)
    for index, (inputs, labels) in enumerate(flat(make_batches())):
        if index % 2:
            backward(model, inputs * float("nan"), labels)
            optimizer.zero_grad()
            optimizer.step()
        backward(model, inputs, labels)
        optimizer.step()
    assert same(model, wanted)


# When steps are made


def test_when_parameters_change(wanted):
    model = make_model()
    optimizer = adam(model)
    will, did, changed = [], [], []
    for inputs, labels in flat(make_batches()):
        will.append(optimizer.will_step)
        before = copy.deepcopy(model)
        backward(model, inputs, labels)
        optimizer.step()
        did.append(optimizer.stepped)
        changed.append(not same(model, before))
    assert will == did == changed == [False, False, True] * UPDATES


def test_flush_makes_the_step_of_the_remainder():
    batches = make_batches((4, 4, 4, 4, 2), updates=2)  # the second batch of an epoch: two micro-batches, one smaller
    halves = [half for micro_batches in batches for half in (micro_batches[:3], micro_batches[3:])]
    theirs, ours = make_model(), make_model()
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), halves)
    optimizer = adam(ours)
    for epoch in batches:
        train(ours, optimizer, [epoch], samples=True)
        assert optimizer.flush()
        assert optimizer.stepped
        assert not optimizer.flush(), "nothing left"
        assert not optimizer.stepped
    assert same(ours, theirs)


def test_flush_takes_a_gradient_that_was_not_handed_over():
    micro_batches = make_batches(updates=1)[0][:2]
    theirs, ours = make_model(), make_model()
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), [micro_batches])
    optimizer = adam(ours)
    backward(ours, *micro_batches[0])
    optimizer.step()
    backward(ours, *micro_batches[1])
    assert optimizer.flush()
    assert same(ours, theirs)


def test_steps_may_change_in_between():
    batches = make_batches((2,) * 5, updates=2)
    theirs, ours = make_model(), make_model()
    optimizer = adam(ours, 5)
    train(ours, optimizer, [batches[0]])
    train(ours, optimizer, [batches[1][:2]])
    optimizer.steps = 2
    train(ours, optimizer, [batches[1][2:]])  # the first of these completes three, the others are two
    parts = [batches[0], batches[1][:3], batches[1][3:]]
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), parts)
    assert same(ours, theirs)


def test_closures(wanted):
    model = make_model()
    optimizer = adam(model)
    calls = []
    for inputs, labels in flat(make_batches()):

        def closure(inputs=inputs, labels=labels):
            calls.append(len(inputs))
            optimizer.zero_grad()
            return backward(model, inputs, labels)

        with torch.no_grad():
            expected = mse_loss(model(inputs), labels)
            assert optimizer.step(closure) == expected
    assert len(calls) == STEPS * UPDATES
    assert same(model, wanted)


def test_a_step_that_raises_leaves_nothing_behind(wanted):
    model = make_model()
    optimizer = adam(model)

    def fail(*_):
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        train(model, optimizer, make_batches())
    handle.remove()
    assert not optimizer.stepped
    assert same(train(model, optimizer, make_batches()), wanted)


def test_discard(wanted):
    model = make_model()
    optimizer = adam(model)
    backward(model, *make_batches()[1][0])
    optimizer.step()
    backward(model, *make_batches()[1][1])
    optimizer.discard()
    assert same(train(model, optimizer, make_batches()), wanted)


# Clipping


def test_clipping_acts_on_the_accumulated_gradient():
    def clip(model):
        norms.append(clip_grad_norm_(model.parameters(), 0.1).item())

    theirs, by_hand, by_hook = make_model(), make_model(), make_model()
    norms = []
    train_big(theirs, torch.optim.SGD(theirs.parameters(), lr=1.0), make_batches(), lambda: clip(theirs))
    expected, norms = norms, []
    assert min(expected) > 0.1, "clipped at all"

    optimizer = optim.SGD(STEPS, by_hand.parameters(), lr=1.0)
    for inputs, labels in flat(make_batches()):
        backward(by_hand, inputs, labels)
        if optimizer.accumulate():
            clip(by_hand)
            optimizer.step()
    assert norms == pytest.approx(expected, rel=1e-12)
    assert same(by_hand, theirs)

    optimizer = optim.SGD(STEPS, by_hook.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: clip(by_hook))
    assert same(train(by_hook, optimizer, make_batches()), theirs)


def test_accumulate_with_sizes_and_the_end_of_an_epoch():
    batches = make_batches((5, 5, 2, 4))
    theirs, ours = make_model(), make_model()
    optimizer = adam(ours)
    for inputs, labels in batches[0]:
        backward(ours, inputs, labels)
        if optimizer.accumulate(len(inputs), last=len(inputs) == 4):
            optimizer.step()
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), [batches[0][:3], batches[0][3:]])
    assert same(ours, theirs)


def test_accumulate_and_then_always_step(wanted):
    model = make_model()
    optimizer = adam(model)
    for inputs, labels in flat(make_batches()):
        backward(model, inputs, labels)
        optimizer.accumulate()
        optimizer.step()
    assert same(model, wanted)


def test_the_mean_gradient_must_be_used_or_dropped(wanted):
    model = make_model()
    optimizer = adam(model, 1)
    backward(model, *make_batches()[1][0])
    assert optimizer.accumulate()
    with pytest.raises(UserError, match="call step"):
        optimizer.accumulate()
    with pytest.raises(UserError, match="closure"):
        optimizer.step(lambda: backward(model, *make_batches()[1][1]))
    optimizer.zero_grad()
    optimizer.steps = STEPS
    assert same(train(model, optimizer, make_batches()), wanted)


# Mixed precision


def scaler_of(**kwargs):
    # Powers of two: what is scaled and unscaled is bit for bit what it was.
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **kwargs)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])  # fused optimizers have a way of their own with scalers
def test_a_scaler_whose_scale_changes_with_every_micro_batch(clip, fused):
    theirs, ours = make_model(), make_model()
    optimizer, scaler = adam(ours, fused=fused), scaler_of(growth_interval=1)
    for inputs, labels in flat(make_batches()):
        optimizer.zero_grad()
        scaler.scale(mse_loss(ours(inputs), labels)).backward()
        if clip:
            scaler.unscale_(optimizer)
            if optimizer.accumulate():
                clip_grad_norm_(ours.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 2 ** (STEPS * UPDATES)
    before_step = (lambda: clip_grad_norm_(theirs.parameters(), 0.1)) if clip else lambda: None
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1, fused=fused), make_batches(), before_step)
    assert same(ours, theirs)


@pytest.mark.parametrize("position", range(STEPS))
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_skips_the_whole_step_and_only_that(position, unscale):
    batches = make_batches()
    theirs, ours = make_model(), make_model()
    optimizer, scaler = adam(ours), scaler_of()
    stepped = []
    for index, (inputs, labels) in enumerate(flat(batches)):
        factor = float("inf") if index == STEPS + position else 1.0
        scaler.scale(mse_loss(ours(inputs), labels) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
            optimizer.accumulate()
        scaler.step(optimizer, samples=None if unscale else 4)
        scaler.update()
        stepped.append(optimizer.stepped)
    assert stepped == [False, False, True] + [False] * STEPS + [False, False, True] * 2
    assert scaler.get_scale() == 512.0
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), [batches[0], *batches[2:]])
    assert same(ours, theirs)


def test_accumulating_scaled_gradients_is_an_error():
    model = make_model()
    inputs, labels = make_batches()[0][0]
    for steps in (1, 2):
        optimizer, scaler = adam(model, steps), scaler_of()
        scaler.scale(mse_loss(model(inputs), labels)).backward()
        optimizer.accumulate()
        with pytest.raises(UserError, match="unscale_"):
            scaler.step(optimizer)


def test_a_scaler_that_is_switched_off(wanted):
    model = make_model()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", enabled=False)
    for inputs, labels in flat(make_batches()):
        scaler.scale(mse_loss(model(inputs), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(model, wanted)


# Schedulers, groups, hooks


def schedules():
    return lambda optimizer: LinearLR(optimizer, 0.1, total_iters=3), lambda optimizer: StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("way", ["if stepped", "hook", "of the wrapped"])
def test_schedulers_count_optimizer_steps(schedule, way):
    theirs, ours = make_model(), make_model()
    plain, optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1), adam(ours)
    wanted, scheduler = schedule(plain), schedule(optimizer.optimizer if way == "of the wrapped" else optimizer)
    if way == "hook":
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro_batches in make_batches():
            train_big(theirs, plain, [micro_batches])
            for micro_batch in micro_batches:
                train(ours, optimizer, [[micro_batch]])
                if way != "hook" and optimizer.stepped:
                    scheduler.step()
            wanted.step()
            assert scheduler.get_last_lr() == wanted.get_last_lr()
    assert same(ours, theirs)


def test_a_scheduler_stepped_with_every_micro_batch_is_warned_of():
    model = make_model()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    first, second = make_batches()[0][:2]
    train(model, optimizer, [[first]])
    scheduler.step()
    with pytest.warns(UserWarning, match=r"only `if optimizer\.stepped`"):
        train(model, optimizer, [[second]])


def test_parameter_groups():
    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.3}], {"params": model[2].parameters(), "lr": 0.03}

    theirs, ours = make_model(), make_model()
    (start, late), (our_start, our_late) = groups(theirs), groups(ours)
    plain, optimizer = torch.optim.SGD(start, lr=1.0), optim.SGD(our_start, lr=1.0, steps=STEPS)
    for micro_batches in make_batches():
        train_big(theirs, plain, [micro_batches])
        train(ours, optimizer, [micro_batches])
        if late:
            plain.add_param_group(late)
            optimizer.add_param_group(our_late)
            late = None
            theirs.zero_grad()
            ours.zero_grad()
        for group in (*plain.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain.param_groups]
    assert same(ours, theirs)


def test_step_hooks_run_once_per_optimizer_step_and_see_the_mean():
    model = make_model()
    optimizer = adam(model)
    seen, everywhere = [], []
    optimizer.register_step_pre_hook(lambda *_: seen.append([weight.grad.clone() for weight in model.parameters()]))
    handle = register_optimizer_step_pre_hook(lambda *_: everywhere.append(1))
    whole = copy.deepcopy(model)
    backward(whole, *big(make_batches()[0]))
    train(model, optimizer, make_batches())
    handle.remove()
    assert len(seen) == len(everywhere) == UPDATES
    for mean, weight in zip(seen[0], whole.parameters(), strict=True):
        assert torch.allclose(mean, weight.grad, rtol=1e-12, atol=0)


def test_it_is_torchs_kind_of_optimizer():
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.2)
    inner.eval = lambda: "of the wrapped one"
    optimizer = optim.Optimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optim.AdamW(2, model.parameters()), optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults["lr"] == 0.2
    assert optimizer.eval() == "of the wrapped one"
    assert "steps=2" in repr(optimizer)
    assert "AdamW" in repr(optimizer)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = optimizer.nothing_such


# State


def saved(value):
    """Through a file as a checkpoint would be, loaded without trust."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("taken", range(STEPS))
def test_going_on_from_a_saved_state_also_in_the_middle(taken, wanted):
    stream = flat(make_batches())
    first, second = make_model(), make_model()
    optimizer = adam(first)
    train(first, optimizer, [stream[: STEPS + taken]])
    assert ("accumulation" in optimizer.state_dict()) == (taken > 0)
    other = optim.Optimizer(torch.optim.Adam(second.parameters(), lr=9.9), steps=STEPS)
    second.load_state_dict(saved(first.state_dict()))
    other.load_state_dict(saved(optimizer.state_dict()))
    train(first, optimizer, [stream[STEPS + taken :]])
    train(second, other, [stream[STEPS + taken :]])
    assert same(second, first, 0.0)
    assert same(second, wanted)


def test_a_loaded_state_does_not_bring_its_steps():
    first, second, theirs = make_model(), make_model(), make_model()
    stream = flat(make_batches((2,) * 6, updates=1))
    optimizer = adam(first, 4)
    train(first, optimizer, [stream[:3]])
    other = adam(second, 2)
    other.load_state_dict(saved(optimizer.state_dict()))
    assert other.steps == 2
    assert other.will_step
    train(second, other, [stream[3:]])  # the first completes four, the others are two
    train_big(theirs, torch.optim.Adam(theirs.parameters(), lr=0.1), [stream[:4], stream[4:]])
    assert same(second, theirs)


def test_states_are_exchanged_with_torch():
    ours, theirs = make_model(), make_model()
    optimizer, plain = adam(ours), torch.optim.Adam(theirs.parameters(), lr=0.1)
    train(ours, optimizer, [make_batches()[0], make_batches()[1][:1]])
    plain.load_state_dict(saved(optimizer.state_dict()))
    theirs.load_state_dict(ours.state_dict())
    train_big(theirs, plain, make_batches()[1:])
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # drops the micro-batch that was taken
    ours.load_state_dict(theirs.state_dict())
    train(ours, optimizer, make_batches())
    train_big(theirs, plain, make_batches())
    assert same(ours, theirs)


def test_an_overflow_is_remembered_in_the_state():
    model = make_model()
    optimizer, scaler = adam(model, 2), scaler_of()
    inputs, labels = make_batches()[0][0]
    scaler.scale(mse_loss(model(inputs), labels) * float("inf")).backward()
    scaler.step(optimizer)
    other = adam(model, 2)
    other.load_state_dict(saved(optimizer.state_dict()))
    train(model, other, [[(inputs, labels)]])
    assert not other.stepped
    assert same(model, make_model(), 0.0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize(
    "make", [adam, lambda model: optim.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1), STEPS)]
)
def test_copies_go_on_by_themselves(make, duplicate, wanted):
    stream = flat(make_batches())
    model = make_model()
    optimizer = make(model)
    StepLR(optimizer, 100)  # torch then keeps a function in the optimizer
    train(model, optimizer, [stream[:5]])
    other_model, other = duplicate((model, optimizer))
    assert type(other) is type(optimizer)
    train(other_model, other, [stream[5:]])
    assert not same(model, wanted), "the original stands where it stood"
    assert same(other_model, wanted)
    train(model, optimizer, [stream[5:]])
    assert same(model, wanted)


def test_a_copy_does_not_take_a_waiting_mean_along(wanted):
    model = make_model()
    optimizer = adam(model, 1)
    backward(model, *make_batches()[0][0])
    optimizer.accumulate()
    other_model, other = copy.deepcopy((model, optimizer))
    other.step()
    assert not other.stepped
    assert same(other_model, model, 0.0)
    assert "accumulation" not in optimizer.state_dict()
    other.steps = STEPS
    assert same(train(other_model, other, make_batches()), wanted)


# torch.compile


@pytest.fixture(scope="module")
def compiled_wanted():
    """Torch's compiled Adam counts in single precision, so it is not quite the other."""
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    plain.step = torch.compile(plain.step, backend="eager")
    return train_big(model, plain, make_batches())


@pytest.mark.parametrize(("what", "graphs"), [("model", 1), ("step", 1), ("wrapped step", 1), ("whole loop body", 2)])
def test_compiled(what, graphs, wanted, compiled_wanted):
    torch._dynamo.reset()
    count = CompileCounter()
    model = make_model()
    optimizer = adam(model)
    run, step = model, optimizer.step
    if what == "model":
        run = torch.compile(model, backend=count)
    elif what == "step":
        step = torch.compile(lambda: optimizer.step(), backend=count)
    elif what == "wrapped step":
        optimizer.optimizer.step = torch.compile(optimizer.optimizer.step, backend=count)

    def body(inputs, labels):
        optimizer.zero_grad()
        mse_loss(run(inputs), labels).backward()
        step()

    if what == "whole loop body":
        body = torch.compile(body, backend=count)
    for inputs, labels in flat(make_batches()):
        body(inputs, labels)
    torch._dynamo.reset()
    assert same(model, wanted if what == "model" else compiled_wanted)
    assert count.frame_count == graphs, "compiled once, whatever the count of micro-batches"


# Mistakes


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "at least 1, not 0"),
        (-2, "at least 1, not -2"),
        (2.0, "a whole number of at least 1, not 2.0"),
        (True, "not True"),
        ("4", "not '4'"),
        (None, "not None"),
        (torch.tensor([1.0, 2.0]), "not a Tensor"),
    ],
)
def test_steps_that_make_no_sense(steps, text):
    model = make_model()
    optimizer = adam(model)
    for call in (
        lambda: optim.Optimizer(torch.optim.SGD(model.parameters()), steps),
        lambda: optim.SGD(steps, model.parameters()),
        lambda: optim.SGD(model.parameters(), steps=steps),
        lambda: setattr(optimizer, "steps", steps),
    ):
        with pytest.raises(UserError, match=re.escape(text)) as error:
            call()
        assert isinstance(error.value, ValueError)
        assert "\n" not in str(error.value)
    assert optimizer.steps == STEPS


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda params: optim.SGD(params, lr=0.1), "not a list"),
        (lambda params: optim.SGD(), "needs steps"),
        (lambda params: optim.Optimizer(params, 2), "wraps a torch optimizer, not a list"),
        (lambda params: optim.Optimizer(optim.SGD(2, params), 2), "wrap it once"),
        (lambda params: optim.Optimizer(torch.optim.LBFGS(params), 2), "inside the closure"),
    ],
)
def test_wrong_calls(call, text):
    with pytest.raises(ValueError, match=text) as error:
        call(list(make_model().parameters()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("samples", [0, -1, float("nan"), float("inf"), True, "4", torch.tensor(4)])
def test_sizes_that_make_no_sense(samples):
    model = make_model()
    optimizer = adam(model)
    backward(model, *make_batches()[0][0])
    with pytest.raises(ValueError, match="the size of the micro-batch"):
        optimizer.step(samples=samples)


def test_sizes_for_some_micro_batches_only():
    model = make_model()
    optimizer = adam(model)
    backward(model, *make_batches()[0][0])
    optimizer.step(samples=4)
    backward(model, *make_batches()[0][1])
    with pytest.raises(UserError, match="to every micro-batch"):
        optimizer.step()


def test_the_ways_to_give_steps():
    params = list(make_model().parameters())
    made = [optim.SGD(5, params, 0.3), optim.SGD(params, 0.3, steps=5), optim.SGD(steps=5, params=params, lr=0.3)]
    made += [optim.Optimizer(torch.optim.SGD(params, 0.3), 5), optim.Optimizer(torch.optim.SGD(params, 0.3), steps=5)]
    assert {(optimizer.steps, optimizer.param_groups[0]["lr"]) for optimizer in made} == {(5, 0.3)}


# On its own


@pytest.mark.slow
def test_it_needs_torch_and_nothing_else():
    code = """
import sys
for name in ("horovod", "tensorflow", "keras", "grpc", "pydantic", "elasticdl.elastic", "elasticdl.proto"):
    sys.modules[name] = None  # an import raises
import elasticdl.ga.torch.optim
from elasticdl.ga.torch import optim
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = elasticdl.ga.torch.optim.SGD(2, [weight], lr=1.0)
for gradient in (1.0, 2.0):
    (weight * gradient).sum().backward()
    optimizer.step()
assert weight.item() == -1.5, weight
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example():
    command = [sys.executable, str(ROOT / "examples" / "accumulate_torch.py"), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"epoch \d+: accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 50


@pytest.mark.parametrize(
    "state",
    [{"a": 1}, None, 5, {"param_groups": 5, "state": {}}, "accumulation"],
    ids=["other keys", "None", "number", "wrong groups", "wrong accumulation"],
)
def test_what_is_no_state_is_told_in_one_line_and_nothing_is_lost(state, wanted):
    model, stream = make_model(), flat(make_batches())
    optimizer = adam(model)
    train(model, optimizer, [stream[:2]])
    if state == "accumulation":
        state = {**optimizer.state_dict(), "accumulation": {"count": 1}}
    with pytest.raises(ValueError, match=r"load_state_dict\(\): .*give what state_dict\(\) returned") as error:
        optimizer.load_state_dict(state)
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)
    train(model, optimizer, [stream[2:]])
    assert same(model, wanted)


def test_a_state_of_other_parameters_is_torchs_own_error():
    with pytest.raises(ValueError, match="parameter group"):
        adam(make_model()).load_state_dict(torch.optim.Adam([torch.ones(1)]).state_dict())
