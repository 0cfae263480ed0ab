"""A prepared plain loop, one of Run:AI's as well: alone it is the library's own; who is the first; what is made of the model."""

import atexit
from types import SimpleNamespace

import pytest
import torch
from elastic_kit import make_data, make_model
from loop_benches import PlainScript, compare, each_batch, run
from refusal_kit import refused
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from elasticdl.common.credentials import CONNECTED, MASTER, WORKER_ID
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch.accumulated_steps import AccumulatedSteps
from elasticdl.elastic.torch.loop_host import LoopHost
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.own_loader import OpenBatch, OwnLoader
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training import batch_shape, runtime
from elasticdl.elastic.training.batch_shape import CurrentJob
from elasticdl.elastic.training.runtime import ScriptRuntime
from elasticdl.ga.torch.optim import Optimizer


@pytest.mark.parametrize(
    ("worker_id", "place", "rank", "expected"),
    [
        (0, (0, 0), None, 0),  # the job's very first worker
        (1, (0, 0), None, 1),
        (0, (0, 3), None, 1),  # the job has trained: it is another's by now
        (2, (4, 1), 0, 0),
        (0, (0, 0), 1, 1),
    ],
)
def test_one_worker_at_most_is_the_first_before_there_is_a_world(worker_id, place, rank, expected):
    job = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    job.session.core.under_master, job.session.core.worker_id = True, worker_id
    job.session.jobs_place = lambda: place
    if rank is not None:
        job.collective.world = World.of(3, tuple(Member(number, "h", 0, False) for number in range(2)), rank)
    assert job.known_rank == expected
    optimizer = torch.optim.SGD((model := make_model()).parameters())
    runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
    runtime._context = job
    loop = PlainLoop(runtime)
    loop._host = LoopHost(job, model, optimizer, OwnLoader(DataLoader(make_data())), {}, lambda: None)
    # In a world, too: its script has not begun.
    assert (loop.rank() > 0, loop.catching_up()) == (expected > 0 or place > (0, 0), place > (0, 0))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({MASTER: "m:1", WORKER_ID: "0"}, 0),
        ({MASTER: "m:1", WORKER_ID: "3"}, 1),
        ({MASTER: "m:1", WORKER_ID: "0", CONNECTED: "m:1"}, 1),  # a process that the worker has started
    ],
)
def test_before_the_script_has_joined_one_worker_is_the_first(monkeypatch, environ, expected):
    for name in (MASTER, WORKER_ID, CONNECTED):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert PlainLoop(ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)).rank() == expected


@pytest.mark.parametrize(("start", "said"), [(None, "the optimizer has a state already"), (0, "")])
def test_an_optimizer_that_has_stepped_has_to_say_with_which_epoch_the_loop_begins(start, said):
    class Stepped(PlainScript):
        def make_optimizers(self):
            (made,) = super().make_optimizers()
            self.head.bias.grad = torch.ones(3)
            made.step()
            return [made]

    Stepped.start = start
    assert said in str(run(each_batch("loss().backward()"), 1, kind=Stepped)[1][0])


def test_what_is_compiled_after_prepare_trains_as_on_one_device():
    def loop(script):
        output_of = torch.compile(script.model, backend="eager")
        for x, y in script.loader:
            cross_entropy(output_of(x), y).backward()
            script.step()

    compare(loop, make=lambda: torch.nn.Linear(8, 3))


def test_outside_the_loop_a_gpus_stream_is_the_scripts_own(monkeypatch):
    stream = [torch.tensor([1])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: stream.__setitem__(0, torch.tensor([seed + 1])))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(stream))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: stream.__setitem__(device, state))

    def loop(script):
        for outside in (1, 2):  # the seed of the script; what it has drawn
            stream[0] = torch.tensor([outside])
            for x, y in script.loader:
                assert stream[0] > 2, "seeded for the batch"
                script.loss(x, y).backward()
                script.step()
            assert stream[0] == outside

    assert run(loop, 1)[1] == (None,)


# -- Run:AI's loop --

STEPS = 4


@pytest.fixture
def loop(monkeypatch):
    """What a script calls, of a process's only job."""
    job = CurrentJob()
    monkeypatch.setattr(batch_shape, "job", job)
    monkeypatch.setattr(runtime, "job", job)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    made = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 1)
    made.init(16, 4)
    yield made, PlainLoop(made), job
    made.context().allow_steps()
    made.context().close()


class Accumulating(PlainScript):
    def make_optimizers(self):
        (made,) = super().make_optimizers()
        self.scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
        return [Optimizer(made, STEPS)]


def accumulates(script):
    """Three epochs of 13 batches, so that accumulations lie over their ends."""

    def clip(*_):
        clip_grad_norm_(script.model.parameters(), 0.5)

    script.optimizer.register_step_pre_hook(clip)
    for _ in range(3):
        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
            script.seen.append(script.optimizer.stepped)
        script.scheduler.step()


@pytest.mark.parametrize(("workers", "loses"), [(1, False), (3, False), (3, True)])
def test_the_loop_is_that_of_the_library_that_accumulates(workers, loses):
    compare(accumulates, workers, loses=loses, kind=Accumulating, samples=50, batch=4)


def runai(loop, size=None, steps=None):
    _, plain, job = loop
    model = torch.nn.DataParallel(make_model())
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps or job.number("steps"))
    return plain.prepare(model, optimizer, DataLoader(make_data(), batch_size=size or job.number("batch_size")))


def test_the_script_of_run_ai_needs_one_line_more_and_keeps_to_the_sizes_that_init_was_told(loop):
    for size, steps, line in (
        (8, 2, "at most 4 fit a GPU"),
        (4, 1, "global batches of 16 samples, and the optimizer makes a step of 4: 1 batch of 4"),
        (3, 4, "makes a step of 12: 4 batches of 3"),
    ):
        refused(line, lambda size=size, steps=steps: runai(loop, size, steps))
    model, optimizer, loader = runai(loop)
    assert type(model) is torch.nn.Sequential
    assert (optimizer.steps, loader.batch_size, loop[0].context().policy.batch_size(3)) == (4, 4, 16)
    loop[0]._finish = None


def test_what_would_drop_or_repeat_gradients_is_refused():
    def loop(script):
        optimizer, batches = script.optimizer, iter(script.loader)
        script.loss(*next(batches)).backward()
        optimizer.step()
        refused("2 times for 1 batches: call it once after each batch", optimizer.step)
        optimizer._handed = 1
        script.loss(*next(batches)).backward()
        refused(r"between loss.backward\(\) and optimizer.step\(\)", optimizer.zero_grad)
        refused(r"waits for the rest of its global batch: call optimizer.zero_grad\(\)", script.model.zero_grad)
        refused(r"flush\(\) in a prepared loop: each step is made of 4 batches", optimizer.flush)
        refused(r"step\(samples=\) in a prepared loop", lambda: optimizer.step(samples=4))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        refused(r"a GradScaler with an optimizer of elasticdl\.ga", lambda: scaler.step(optimizer))
        batches.close()

    run(loop, 1, kind=Accumulating, batch=4)


def test_a_newcomer_counts_from_where_the_job_stands_whatever_its_loop_began_with():
    """Its script has read a checkpoint that was written within an accumulation, and passes by the one batch that is left of that."""
    host = SimpleNamespace(open_batches=None, is_idle=True)
    optimizer = AccumulatedSteps(Optimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), 2), host)
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
