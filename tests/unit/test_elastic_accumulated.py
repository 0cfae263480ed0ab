"""Run:AI's loop over a prepared loader: alone it is that of `elasticdl.ga` to the bit; what can't be had is refused."""

import atexit
from types import SimpleNamespace

import pytest
import torch
from test_elastic_loop import make_data, make_model, prepared
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.accumulated_steps import AccumulatedSteps
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.own_loader import OpenBatch
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training import batch_shape
from elasticdl.elastic.training.batch_shape import CurrentJob
from elasticdl.elastic.training.runtime import ScriptRuntime
from elasticdl.ga.torch.optim import Optimizer

STEPS = 4


@pytest.fixture
def loop(monkeypatch):
    """What a script calls, of a process's only job."""
    from elasticdl.elastic.training import runtime

    job = CurrentJob()
    monkeypatch.setattr(batch_shape, "job", job)
    monkeypatch.setattr(runtime, "job", job)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    made = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 1)
    plain = PlainLoop(made)
    yield made, plain, job
    made.context().allow_steps()
    made.context().close()


def trained(prepares, clips=False):
    """The losses and weights of three epochs of 13 batches, so that accumulations lie over their ends."""
    model = make_model()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), STEPS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    loader = DataLoader(make_data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7))
    if prepares is not None:
        model, optimizer, loader = prepares(model, optimizer, loader)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    if clips:
        optimizer.register_step_pre_hook(clip)
    losses, stepped = [], []
    for _ in range(3):
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            stepped.append(optimizer.stepped)
        scheduler.step()
    return losses, stepped, [each.tolist() for each in model.parameters()]


def alone(model, optimizer, loader):
    inner = optimizer.optimizer
    loader, view = prepared(model, inner, loader, share=1 / optimizer.steps)
    return model, AccumulatedSteps(optimizer, view), loader


@pytest.mark.parametrize("options", [{}, {"clips": True}])
def test_alone_the_loop_is_that_of_the_library_that_accumulates(options):
    losses, stepped, weights = trained(alone, **options)
    theirs = trained(None, **options)
    assert stepped == theirs[1]
    assert losses == pytest.approx(theirs[0], rel=1e-5)
    for mine, others in zip(weights, theirs[2], strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(others), rtol=1e-4, atol=1e-6)


def runai(loop, size=None, steps=None, model=None):
    made, plain, job = loop
    made.init(16, 4)
    model = model or torch.nn.DataParallel(make_model())
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps or job.number("steps"))
    loader = DataLoader(make_data(), batch_size=size or job.number("batch_size"))
    return (*plain.prepare(model, optimizer, loader), made)


def test_the_script_of_run_ai_needs_one_line_more(loop):
    model, optimizer, loader, made = runai(loop)
    assert type(model) is torch.nn.Sequential
    assert (optimizer.steps, loader.batch_size, made.context().policy.batch_size(3)) == (4, 4, 16)
    made._finish = None


@pytest.mark.parametrize(
    ("size", "steps", "line"),
    [
        (8, 2, "at most 4 fit a GPU"),
        (4, 1, "global batches of 16 samples, and the optimizer makes a step of 4: 1 batch of 4"),
        (3, 4, "makes a step of 12: 4 batches of 3"),
    ],
)
def test_other_sizes_than_init_was_told_are_refused(loop, size, steps, line):
    with pytest.raises(UserError, match=line):
        runai(loop, size, steps)


def test_what_would_drop_or_repeat_gradients_is_refused():
    model = make_model()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), STEPS)
    model, optimizer, loader = alone(model, optimizer, DataLoader(make_data(), batch_size=4))
    batches = iter(loader)

    def backward():
        inputs, labels = next(batches)
        cross_entropy(model(inputs), labels).backward()

    backward()
    optimizer.step()
    with pytest.raises(UserError, match="2 times for 1 batches: call it once after each batch"):
        optimizer.step()
    optimizer._handed = 1
    backward()
    with pytest.raises(UserError, match=r"between loss.backward\(\) and optimizer.step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(UserError, match=r"waits for the rest of its global batch: call optimizer.zero_grad\(\)"):
        model.zero_grad()
    with pytest.raises(UserError, match=r"flush\(\) in a prepared loop: each step is made of 4 batches"):
        optimizer.flush()
    with pytest.raises(UserError, match=r"step\(samples=\) in a prepared loop"):
        optimizer.step(samples=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(UserError, match=r"a GradScaler with an optimizer of elasticdl\.ga"):
        scaler.step(optimizer)
    batches.close()


def test_a_newcomer_counts_from_where_the_job_stands_whatever_its_loop_began_with():
    """Its script has read a checkpoint that was written within an accumulation, and passes by the one batch that is left of that."""
    model = make_model()
    host = SimpleNamespace(open_batches=None, is_idle=True)
    optimizer = AccumulatedSteps(Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2), host)
    optimizer.step()
    host.open_batches, stepped = [], []
    for _ in range(4):
        host.open_batches = [*host.open_batches, OpenBatch(None, None)]
        assert not optimizer.will_step or len(host.open_batches) == 2
        optimizer.step()
        stepped.append(optimizer.stepped)
        if optimizer.stepped:
            host.open_batches = []
    assert stepped == [False, True, False, True]
