"""What else accumulation is with torch: loops of every shape, schedulers, hooks, states, copies, ``torch.compile``."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from ga_kit import STEPS, UPDATES, Torch, flat, make_batches
from refusal_kit import refused
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from elasticdl.ga.torch import optim


@pytest.fixture(scope="module")
def wanted():
    """What Adam makes of the whole batches."""
    return Torch.plain(make_batches())


def test_gradients_that_are_rows():
    """As of an embedding's table."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 12, (UPDATES, 12), generator=generator)
    labels = torch.randn(UPDATES, 12, 4, generator=generator, dtype=torch.float64)

    def run(make, sizes):
        torch.manual_seed(0)
        table = torch.nn.Embedding(12, 4, sparse=True, dtype=torch.float64)
        optimizer = make(table.parameters())
        for asked, label in zip(rows, labels, strict=True):
            for some, of in zip(asked.split(sizes), label.split(sizes), strict=True):
                optimizer.zero_grad()
                mse_loss(table(some), of).backward()
                optimizer.step(**({"samples": len(some)} if len(sizes) > 1 else {}))
        return table.weight

    ours, theirs = run(lambda given: optim.SparseAdam(3, given), (5, 5, 2)), run(torch.optim.SparseAdam, (12,))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-7)


def test_unequal_micro_batches_without_their_sizes_weigh_the_same():
    batches = make_batches((5, 5, 2))
    theirs = Torch("SGD", None)
    for micro_batches in batches:
        theirs.optimizer.zero_grad()
        (sum(theirs.loss(*each) for each in micro_batches) / len(micro_batches)).backward()
        theirs.optimizer.step()
    assert Torch("SGD").train(flat(batches)).same(theirs)


def test_gradients_in_memory_that_is_used_again():
    (weight,) = Torch.weights([0.0] * 3)
    optimizer, bucket = optim.SGD(2, [weight], lr=1.0), torch.empty(5, dtype=torch.float64)
    for value in (1.0, 3.0):
        bucket.fill_(value)
        weight.grad = bucket[1:4]
        optimizer.step()
    assert weight.tolist() == [-2.0] * 3


# -- loops in every usual shape --


def zero_before_backward(training, inputs, labels):
    loss = training.loss(inputs, labels)
    training.optimizer.zero_grad(set_to_none=False)
    loss.backward()
    training.optimizer.step()


def another_cleared_before_its_step(training, inputs, labels):
    training.loss(inputs * float("nan"), labels).backward()
    training.optimizer.zero_grad()
    training.optimizer.step()
    training.loss(inputs, labels).backward()
    training.optimizer.step()


def closure(training, inputs, labels):
    calls, optimizer = [], training.optimizer

    def evaluate():
        calls.append(1)
        optimizer.zero_grad()
        loss = training.loss(inputs, labels)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(evaluate) == training.loss(inputs, labels) or optimizer.stepped
    assert calls == [1]


LOOPS = [Torch.take, zero_before_backward, another_cleared_before_its_step, closure]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_gives_what_one_big_batch_gives(loop, wanted):
    training = Torch()
    will, did, changed = [], [], []
    for inputs, labels in flat(make_batches()):
        will.append(training.optimizer.will_step)
        before = [each.copy() for each in training.numbers()]
        loop(training, inputs, labels)
        did.append(training.optimizer.stepped)
        changed.append(any((mine != other).any() for mine, other in zip(training.numbers(), before, strict=True)))
        assert all(weight.grad is None for weight in training.variables)
    assert will == did == changed == [False, False, True] * UPDATES
    assert training.same(wanted)


def test_flush_takes_a_gradient_that_was_not_handed_over():
    first, second = micro_batches = make_batches(updates=1)[0][:2]
    training = Torch().train([first])
    training.loss(*second).backward()
    assert training.optimizer.flush()
    assert training.same(Torch.plain([micro_batches]))


def test_a_step_that_raises_leaves_nothing_behind(wanted):
    training = Torch()

    def fail(*_):
        raise RuntimeError("no")

    handle = training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        training.train(flat(make_batches()))
    handle.remove()
    assert not training.optimizer.stepped
    assert training.train(flat(make_batches())).same(wanted)


# -- clipping, schedulers, groups --


@pytest.mark.parametrize("fused", [False, True])  # fused optimizers have a way of their own with scalers
def test_clipping_acts_on_the_accumulated_gradient_also_under_a_scaler(fused):
    ours, theirs = Torch(fused=fused), Torch(steps=None, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for each in (ours, theirs):

        def clip(optimizer, *_, each=each):
            assert clip_grad_norm_(each.variables, 0.1).item() > 0.1, "clipped at all"

        each.optimizer.register_step_pre_hook(clip)
    for inputs, labels in flat(make_batches()):
        ours.optimizer.zero_grad()
        scaler.scale(ours.loss(inputs, labels)).backward()
        scaler.step(ours.optimizer)
        scaler.update()
    assert ours.same(theirs.train(flat(make_batches((12,)))))


def test_a_scheduler_in_a_hook_counts_optimizer_steps():
    ours, theirs = Torch(), Torch(steps=None)
    for each in (ours, theirs):
        scheduler = StepLR(each.optimizer, 2, 0.5)
        each.optimizer.register_step_post_hook(lambda *_, scheduler=scheduler: scheduler.step())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.train(flat(make_batches())).same(theirs.train(flat(make_batches((12,)))))


def test_a_scheduler_stepped_with_every_micro_batch_is_warned_of():
    training = Torch()
    scheduler = StepLR(training.optimizer, 1, 0.5)
    first, second = make_batches()[0][:2]
    training.train([first])
    scheduler.step()
    with pytest.warns(UserWarning, match=r"only `if optimizer\.stepped`"):
        training.train([second])


def test_parameter_groups():
    ours, theirs = Torch(), Torch()
    groups = [[{"params": each.model[0].parameters(), "lr": 0.3}] for each in (ours, theirs)]
    ours.optimizer = optim.SGD(groups[0], lr=1.0, steps=STEPS)
    theirs.optimizer = torch.optim.SGD(groups[1], lr=1.0)
    for update, (micro_batches, whole) in enumerate(zip(make_batches(), make_batches((12,)), strict=True)):
        theirs.train(whole)
        ours.train(micro_batches)
        for each in (theirs, ours):
            if update == 0:
                each.optimizer.add_param_group({"params": each.model[2].parameters(), "lr": 0.03})
                each.model.zero_grad()
            for group in each.optimizer.param_groups:
                group["lr"] *= 0.9
    assert ours.same(theirs)


def test_it_is_torchs_kind_of_optimizer():
    inner = torch.optim.AdamW(Torch.weights([1.0]), lr=0.2)
    inner.eval = lambda: "of the wrapped one"
    optimizer = optim.Optimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert (optimizer.param_groups is inner.param_groups, optimizer.state is inner.state) == (True, True)
    assert (optimizer.defaults["lr"], optimizer.eval()) == (0.2, "of the wrapped one")
    assert repr(optimizer).startswith("Optimizer (steps=2) of AdamW")
    for missing in (lambda: optimizer.nothing_such, lambda: optim.nothing_such):
        with pytest.raises(AttributeError, match="nothing_such"):
            missing()


# -- states and copies --


def test_states_are_exchanged_with_torch():
    batches, whole = make_batches(), make_batches((12,))
    ours, theirs = Torch(), Torch(steps=None)
    ours.train(batches[0] + batches[1][:1])
    file = io.BytesIO()
    torch.save(ours.optimizer.state_dict(), file)
    file.seek(0)
    theirs.optimizer.load_state_dict(torch.load(file, weights_only=True))
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.train(flat(whole[1:]))
    ours.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))  # drops the one that was taken
    ours.model.load_state_dict(theirs.model.state_dict())
    assert ours.train(flat(batches)).same(theirs.train(flat(whole)))


@pytest.mark.parametrize("state", [{"a": 1}, None, {"param_groups": 5, "state": {}}, "accumulation"])
def test_what_is_no_state_is_told_in_one_line_and_nothing_is_lost(state, wanted):
    stream = flat(make_batches())
    training = Torch().train(stream[:2])
    optimizer = training.optimizer
    if state == "accumulation":
        state = {**optimizer.state_dict(), "accumulation": {"count": 1}}
    refused(r"load_state_dict\(\): .*give what state_dict\(\) returned", lambda: optimizer.load_state_dict(state))
    assert training.train(stream[2:]).same(wanted)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_go_on_by_themselves(duplicate, wanted):
    stream = flat(make_batches())
    training = Torch()
    StepLR(training.optimizer, 100)  # torch then keeps a function in the optimizer
    training.train(stream[:5])
    other = duplicate(training)
    assert type(other.optimizer) is type(training.optimizer)
    assert other.train(stream[5:]).same(wanted)
    assert not training.same(wanted), "the original stands where it stood"
    assert training.train(stream[5:]).same(wanted)


@pytest.mark.parametrize("what", ["wrapped step", "whole loop body"])
def test_compiled(what):
    torch._dynamo.reset()
    count = CompileCounter()
    ours, theirs = Torch(), Torch(steps=None)
    body = ours.take
    if what == "wrapped step":  # torch's compiled Adam counts in single precision, so it is not quite the other
        theirs.optimizer.step = torch.compile(theirs.optimizer.step, backend="eager")
        ours.optimizer.optimizer.step = torch.compile(ours.optimizer.optimizer.step, backend=count)
    else:
        body = torch.compile(body, backend=count)
    for micro_batch in flat(make_batches()):
        body(*map(torch.as_tensor, micro_batch))
    assert ours.same(theirs.train(flat(make_batches((12,)))))
    torch._dynamo.reset()
    assert count.frame_count == 1, "compiled once, whatever the count of micro-batches"
