"""Accumulated micro-batches against the one big batch that torch itself is given."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from elasticdl.ga.torch import optim

SHIPPED = sorted(
    {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)} - {"Optimizer", "LBFGS"}
)
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


def train_big(model, optimizer, batches, before_step=lambda model: None):
    for micro_batches in batches:
        optimizer.zero_grad()
        backward(model, *big(micro_batches))
        before_step(model)
        optimizer.step()
    return model


def plain(batches, before_step=lambda model: None, make=torch.optim.Adam, lr=0.1, **kwargs):
    """What is wanted: torch alone, whole batches."""
    model = make_model()
    return train_big(model, make(model.parameters(), lr=lr, **kwargs), batches, before_step)


def train(model, optimizer, stream, samples=False):
    for inputs, labels in stream:
        optimizer.zero_grad()
        backward(model, inputs, labels)
        optimizer.step(samples=len(inputs) if samples else None)
    return model


def same(model, wanted, tolerance=1e-12):
    """The largest difference of all parameters, relative to the parameter, is not over that."""
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs) <= tolerance


def adam(model, steps=STEPS, **kwargs):
    return optim.Adam(steps, model.parameters(), lr=0.1, **kwargs)


def ours(steps=STEPS, **kwargs):
    model = make_model()
    return model, adam(model, steps, **kwargs)


@pytest.fixture(scope="module")
def wanted():
    """The model that Adam gives on the whole batches."""
    return plain(make_batches())


# The numbers


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHIPPED)
def test_micro_batches_give_what_one_big_batch_gives(name, dtype, sizes):
    sparse = name == "SparseAdam"
    batches = make_batches(sizes, dtype, sparse)
    theirs, model = make_model(dtype, sparse), make_model(dtype, sparse)
    train_big(theirs, getattr(torch.optim, name)(theirs.parameters()), batches)
    train(model, getattr(optim, name)(STEPS, model.parameters()), flat(batches), samples=sizes[0] != sizes[-1])
    assert not same(make_model(dtype, sparse), theirs, 1e-4), "trained at all"
    assert same(model, theirs, TOLERANCE[dtype])


def test_what_is_no_optimizer_of_torch_is_not_there():
    for name in ("Optimizer_", "lr_scheduler"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(optim, name)


def test_unequal_micro_batches_without_their_sizes_weigh_the_same():
    sizes = (5, 5, 2)
    theirs, model = make_model(), make_model()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for micro_batches in make_batches(sizes):
        optimizer.zero_grad()
        (sum(mse_loss(theirs(inputs), labels) for inputs, labels in micro_batches) / len(sizes)).backward()
        optimizer.step()
    train(model, optim.SGD(STEPS, model.parameters(), lr=0.1), flat(make_batches(sizes)))
    assert same(model, theirs)


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
    mine = run(lambda weights: optim.SGD(2, weights, **options), [[[0]], [[0, 1]]] * 3)
    theirs = run(lambda weights: torch.optim.SGD(weights, **options), [[[0], [0, 1]]] * 3)
    assert torch.allclose(mine, theirs, rtol=1e-12, atol=0)
    assert (mine[2] == 1).all(), "no gradient at all: not even weight decay"


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


# Loops in every usual shape


def zero_before_forward(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    backward(model, inputs, labels)
    optimizer.step()


def zero_before_backward(model, optimizer, inputs, labels):
    loss = mse_loss(model(inputs), labels)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()


def zero_of_the_model(model, optimizer, inputs, labels):
    backward(model, inputs, labels)
    optimizer.step()
    model.zero_grad()


def another_cleared_before_its_step(model, optimizer, inputs, labels):
    backward(model, inputs * float("nan"), labels)
    optimizer.zero_grad()
    optimizer.step()
    backward(model, inputs, labels)
    optimizer.step()


def closure(model, optimizer, inputs, labels):
    calls = []

    def evaluate():
        calls.append(1)
        optimizer.zero_grad()
        return backward(model, inputs, labels)

    with torch.no_grad():
        assert optimizer.step(evaluate) == mse_loss(model(inputs), labels) or optimizer.stepped
    assert calls == [1]


@pytest.mark.parametrize(
    "loop",
    [
        zero_before_forward,
        zero_before_backward,
        zero_of_the_model,
        another_cleared_before_its_step,
        closure,
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_gives_what_one_big_batch_gives(loop, wanted):
    model, optimizer = ours()
    will, did, changed = [], [], []
    for inputs, labels in flat(make_batches()):
        will.append(optimizer.will_step)
        before = copy.deepcopy(model)
        loop(model, optimizer, inputs, labels)
        did.append(optimizer.stepped)
        changed.append(not same(model, before))
        assert all(weight.grad is None for weight in model.parameters())
    assert will == did == changed == [False, False, True] * UPDATES
    assert same(model, wanted)


def test_flush_makes_the_step_of_the_remainder():
    batches = make_batches((4, 4, 4, 4, 2), updates=2)  # the second batch of an epoch: two micro-batches, one smaller
    model, optimizer = ours()
    for epoch in batches:
        train(model, optimizer, epoch, samples=True)
        assert optimizer.flush()
        assert optimizer.stepped
        assert not optimizer.flush(), "nothing left"
        assert not optimizer.stepped
    assert same(model, plain([half for epoch in batches for half in (epoch[:3], epoch[3:])]))


def test_flush_takes_a_gradient_that_was_not_handed_over():
    micro_batches = make_batches(updates=1)[0][:2]
    model, optimizer = ours()
    train(model, optimizer, micro_batches[:1])
    backward(model, *micro_batches[1])
    assert optimizer.flush()
    assert same(model, plain([micro_batches]))


def test_steps_may_change_in_between():
    batches = make_batches((2,) * 5, updates=2)
    model, optimizer = ours(5)
    train(model, optimizer, batches[0] + batches[1][:2])
    optimizer.steps = 2
    train(model, optimizer, batches[1][2:])  # the first of these completes three, the others are two
    assert same(model, plain([batches[0], batches[1][:3], batches[1][3:]]))


def test_a_step_that_raises_and_what_is_discarded_leave_nothing_behind(wanted):
    model, optimizer = ours()

    def fail(*_):
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        train(model, optimizer, flat(make_batches()))
    handle.remove()
    assert not optimizer.stepped
    train(model, optimizer, make_batches()[1][:1])
    backward(model, *make_batches()[1][1])
    optimizer.discard()
    assert same(train(model, optimizer, flat(make_batches())), wanted)


# Clipping, mixed precision


def clip(model):
    assert clip_grad_norm_(model.parameters(), 0.1).item() > 0.1, "clipped at all"


def test_clipping_acts_on_the_accumulated_gradient():
    model = make_model()
    optimizer = optim.SGD(STEPS, model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    train(model, optimizer, flat(make_batches()))
    assert same(model, plain(make_batches(), clip, torch.optim.SGD, lr=1.0))


def scaler_of(**kwargs):
    # Powers of two: what is scaled and unscaled is bit for bit what it was.
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **kwargs)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])  # fused optimizers have a way of their own with scalers
def test_a_scaler_whose_scale_changes_with_every_micro_batch(clips, fused):
    (model, optimizer), scaler = ours(fused=fused), scaler_of(growth_interval=1)
    if clips:
        optimizer.register_step_pre_hook(lambda *_: clip(model))
    for inputs, labels in flat(make_batches()):
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(inputs), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 2 ** (STEPS * UPDATES)
    assert same(model, plain(make_batches(), *[clip] * clips, fused=fused))


@pytest.mark.parametrize("position", range(STEPS))
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_skips_the_whole_step_and_only_that(position, unscale):
    batches = make_batches()
    (model, optimizer), scaler, stepped = ours(), scaler_of(), []
    for index, (inputs, labels) in enumerate(flat(batches)):
        factor = float("inf") if index == STEPS + position else 1.0
        scaler.scale(mse_loss(model(inputs), labels) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, samples=4)
        scaler.update()
        stepped.append(optimizer.stepped)
    assert stepped == [False, False, True] + [False] * STEPS + [False, False, True] * 2
    assert scaler.get_scale() == 512.0
    assert same(model, plain([batches[0], *batches[2:]]))
