"""What a plain loop, or that of the library, can't have is refused in one line: by all workers, and where one is alone."""

import contextlib
import itertools
import queue
import threading

import pytest
import torch
from elastic_kit import Board, Trainee
from plain_kit import BATCH, Script, each_batch, run
from refusal_kit import refused, require_refusal
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch.loop_host import LoopHost
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.refusals import require_plain
from elasticdl.elastic.torch_kit.tensors import ElasticContext, look_before_steps, refuse_others
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.runtime import ScriptRuntime

HERE = r"test_elastic_loop_refused\.py:\d+"

# -- gradients: what is done with a batch, between two of the loader --


LOOKED_AT = r"looked at \(.*plain_kit.py:\d+, .* that elastic.prepare\(\) was not given\) between two backward"
OTHERWISE = "gradients were made otherwise than by loss.backward"
BY_A_PARAMETER = r"^torch.autograd.grad\(\) by a parameter that is trained"
NOT_GIVEN = "^SGD steps while a batch is trained on, and was not given before: .* give it to elastic.prepare, too"

WITH_A_BATCH = {
    "loss().backward(); optimizer.step(); loss().backward()": "called again after optimizer.step",
    "loss().backward(); model.body[0].weight.grad; loss().backward()": LOOKED_AT,
    "loss().backward(); torch.optim.SGD(model.parameters()).step(); loss().backward()": NOT_GIVEN,
    "loss().backward(); optimizer.step(); optimizer.step()": "without a batch from the loader",
    "loss().backward(); optimizer.step()": "the gradients of an earlier batch are still there",
    "loss().backward(); autograd.backward(loss()); optimizer.step()": OTHERWISE,
    "autograd.backward(loss()); loss().backward()": OTHERWISE,
    "script.head.bias.grad = ones_like(script.head.bias); optimizer.step()": OTHERWISE,
    "optimizer.step(lambda: autograd.backward(loss()))": OTHERWISE,
    "autograd.grad(loss(), [x.requires_grad_(), model.body[0].weight], create_graph=True)": BY_A_PARAMETER,
    "autograd.grad(outputs=loss(), inputs=model.body[0].bias)": BY_A_PARAMETER,
    "mse_loss(model(x), x[:, :3], reduction='sum').backward()": "the loss is a sum over the samples",
    "weight = model.body[0].weight; weight.data.add_(ones_like(weight)); loss().backward(); step()": (
        r"plain_kit.py:\d+: add_ changes a parameter that is trained.* change it after optimizer.step"
    ),
    "model.body[0].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step()); loss().backward(); step()": (
        r"^gradients were .* or used, as by optimizer\.step\(\) in a hook, or changed"
    ),
    "own = torch.nn.Parameter(zeros(1)); (loss() + own.square().sum()).backward(); optimizer.step();"
    "torch.optim.SGD([own]).step()": NOT_GIVEN,
    "model.own = torch.nn.Parameter(zeros(1)); (loss() + model.own.square().sum()).backward(); optimizer.step();"
    "torch.optim.SGD([model.own]).step()": NOT_GIVEN,
}


def all_refuse(words, loop, workers, **options):
    _, said = run(loop, workers, **options)
    for error in said:
        require_refusal(error, words)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("text", WITH_A_BATCH)
def test_gradients_that_cant_be_right(text, workers):
    all_refuse(WITH_A_BATCH[text], each_batch(text, steps=False), workers)


@pytest.mark.parametrize("text", [*WITH_A_BATCH][:5])
def test_a_script_that_no_master_has_started_is_told_as_well(text):
    words = LOOKED_AT if "torch.optim" in text else WITH_A_BATCH[text]
    all_refuse(words, each_batch(text, steps=False), 1, under_master=False)


class TwoOptimizers(Script):
    def make_optimizers(self):
        body, head = self.model.body[0], self.model.body[2]
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (body, torch.nn.ModuleList([head, self.head]))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss().backward(); optimizer.step(); loss().backward()", "as for a GAN: a plain loop has one sum"),
        (
            "loss().backward(); optimizer.step(); optimizer.zero_grad()",
            "the gradients of an earlier batch are still there: .* also of one that does not step",
        ),
    ],
)
def test_gradients_of_several_optimizers(text, words):
    all_refuse(words, each_batch(text, steps=False), 2, kind=TwoOptimizers)


# -- batches --


def train(script, x, y):
    script.loss(x, y).backward()
    script.step()


def skips_what_is_not_full(script):
    for x, y in script.loader:
        if x.size(0) != BATCH:
            continue
        train(script, x, y)


def skips_by_length(script):
    for x, y in script.loader:
        inputs = x.float()
        if len(inputs) < BATCH:
            continue
        train(script, inputs, y)


def skips_by_shape(script):
    for x, y in script.loader:
        if x.shape[0] == BATCH:
            train(script, x, y)


def fetches_ahead(script, change=lambda x: x):
    """As people's prefetchers do."""
    batches = iter(script.loader)
    following = next(batches)
    while following is not None:
        x, y = following
        following = next(batches, None)
        train(script, change(x), y)


def fetches_ahead_and_converts(script):
    fetches_ahead(script, lambda x: x.double().float())


def keeps_an_epoch(script):
    for x, y in list(script.loader):
        train(script, x, y)


def repeats_by_itertools(script):
    for x, y in itertools.islice(itertools.cycle(script.loader), 2 * len(script.loader)):
        train(script, x, y)


def trains_on_one_batch(script):
    train(script, *next(iter(script.loader)))


def makes_a_loader_anew(script):
    for _ in range(2):
        for x, y in script.loader:
            train(script, x, y)
        script.loader = DataLoader(script.loader.dataset, batch_size=BATCH)


LOOPS_WITHIN = each_batch("next(iter(script.loader))", steps=False)
OF_THE_SIZE = rf"{HERE}.* this worker's part has 4 of its 8 samples.*drop_last=True"
AHEAD = r"\.py:\d+.* works on a batch after the next one was given, as with a prefetcher"
KEPT = "outside of the loop over the prepared loader, as on next\\(iter\\(loader\\)\\)"


@pytest.mark.parametrize(
    ("loop", "workers", "words"),
    [
        *((each, 2, OF_THE_SIZE) for each in (skips_what_is_not_full, skips_by_length, skips_by_shape)),
        *((fetches_ahead, workers, AHEAD) for workers in (1, 2)),
        (fetches_ahead_and_converts, 2, AHEAD),
        *(
            (LOOPS_WITHIN, workers, "looped over twice at once; expected one loop after the other")
            for workers in (1, 2)
        ),
        *(
            (each, workers, KEPT)
            for each in (keeps_an_epoch, repeats_by_itertools, trains_on_one_batch, makes_a_loader_anew)
            for workers in (1, 2)
        ),
    ],
)
def test_batches_that_are_left_out_by_their_size_fetched_ahead_or_kept(loop, workers, words):
    all_refuse(words, loop, workers)


def test_batches_that_another_thread_fetches():
    def loop(script):
        batches = queue.Queue(1)
        thread = threading.Thread(target=lambda: [batches.put(each) for each in script.loader], daemon=True)
        thread.start()
        x, y = batches.get(timeout=30)
        try:
            train(script, x, y)
        finally:
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    batches.get(timeout=0.01)

    all_refuse("looped over in another thread than the one that trains, as by a background", loop, 1)


def test_a_worker_that_ends_before_the_others_is_told_of_whatever_rides(monkeypatch):
    monkeypatch.setattr(LoopHost, "rides", lambda _: {"number": [1.0]})
    monkeypatch.setattr(LoopHost, "heard", lambda _, rides: bool(rides["number"] == 2))

    def loop(script):
        for number, (x, y) in enumerate(script.loader):
            if script.worker and number == 3:
                script.host.finish()
            train(script, x, y)

    all_refuse("1 of 2 workers ended their training after step 3 and the others go on", loop, 2)


# -- what is given to `prepare` --


class Negating(DataLoader):
    def __iter__(self):
        return (-batch for batch in super().__iter__())


class StatefulDataLoader(DataLoader):
    """By its name, as torchdata's."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda data: [1, 2], "the loader is a list"),
        (Negating, "the loader is a Negating, whose own __iter__ is not called"),
        (StatefulDataLoader, "the loader is a StatefulDataLoader, whose state says nothing"),
        (
            lambda data: DataLoader(torch.utils.data.ChainDataset([])),
            "what is only iterated over can't be divided",
        ),
        (lambda data: DataLoader(data, batch_size=None), r"DataLoader\(batch_size=None\) makes no batches"),
        (lambda data: DataLoader(data, sampler=torch.utils.data.Sampler()), "sampler has no length"),
        (lambda data: DataLoader(data, batch_size=100, drop_last=True), "has no batch"),
    ],
)
def test_a_loader_that_cant_be_divided(make, words):
    data = Script(None).loader.dataset
    refused(words, lambda: OwnLoader(make(data)))


class FullyShardedDataParallel(torch.nn.Linear):
    """By its name."""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ([torch.nn.Linear(1, 1)], "the model is a list"),
        (torch.nn.Sequential(torch.nn.SyncBatchNorm(3)), "0 is a SyncBatchNorm, which needs a process group"),
        (torch.nn.DataParallel(torch.nn.Linear(1, 1)), "the model is a DataParallel: give the module within"),
        (FullyShardedDataParallel(1, 1), "the model is a FullyShardedDataParallel: each worker holds the whole model"),
    ],
)
def test_a_model_for_other_ways_of_training(model, words):
    refused(words, lambda: require_plain(model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])))


class AcceleratedOptimizer(torch.optim.SGD):
    """By its name."""


class DistributedOptimizer(torch.optim.SGD):
    def _allreduce_grad_async(self): ...


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates its closure several times"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients alone"),
        (AcceleratedOptimizer, "the optimizer was prepared by accelerate, for its own launcher: leave Accelerator out"),
        (DistributedOptimizer, "the optimizer is Horovod's DistributedOptimizer: give the one within"),
    ],
)
def test_an_optimizer_whose_gradients_can_not_be_summed(kind, words):
    model = torch.nn.Linear(1, 1)
    optimizer = kind(model.parameters())
    context = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    refused(words, lambda: require_plain(model, optimizer))
    refused(words, lambda: TorchState(context, model, optimizer, None, {}))


def test_a_process_group_that_a_library_has_made_of_the_environment_is_explained(monkeypatch):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    refused(r"leave init_process_group out, .* the job$", lambda: require_plain(model, optimizer))
    monkeypatch.setenv("RANK", "0")
    refused("RANK is in the environment, .*: unset it", lambda: require_plain(model, optimizer))


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, r"expected prepare\(model, optimizer, loader\)"),
        ([torch.optim.SGD(torch.nn.Linear(1, 1).parameters())], {}, r"expected prepare\(model, optimizer, loader\)"),
        ([None, None], {"start": 1}, "there is no argument start; expected prepare"),
    ],
)
def test_a_call_of_prepare_that_says_too_little_or_too_much(given, options, words):
    loop = PlainLoop(ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0))
    refused(words, lambda: loop.prepare(torch.nn.Linear(1, 1), *given, **options))


def test_parameters_that_are_in_no_module_that_was_given():
    model, norm = torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters()], lr=0.1)
    context = Trainee(0, Board(1), BatchPolicy(16, None)).context
    refused(
        r"^parameters of the optimizer, of the shapes \(2,\), \(2,\), are in no module that was given, .* torch.nn.ParameterList",
        lambda: LoopState(context, model, optimizer, {}),
    )
    LoopState(context, model, optimizer, {"norm": norm})


def test_an_optimizer_that_was_made_anew_within_training():
    """One within a prepared one, which steps the same groups, is that one's."""
    model = torch.nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    within, anew = torch.optim.SGD(given.param_groups), torch.optim.SGD(model.parameters(), lr=0.01)
    within.param_groups = given.param_groups
    refuse_others(given, lambda: True, "give it along")
    given.step()
    within.step()
    refused("^SGD steps while a batch is trained on, and was not given before", anew.step)
    look_before_steps("others", None)


# -- the loop of the library: each is called with a micro-batch and the loss that its backward pass is made of --


def a_term_beside(member, batch, inputs, loss):
    torch.autograd.backward(member.model(inputs).square().mean())
    batch.backward(loss)


def a_term_after(member, batch, inputs, loss):
    batch.backward(loss)
    if batch.untaken:
        member.model(inputs).square().mean().backward()


def assigned_before(member, batch, inputs, loss):
    member.model[0].bias.grad = torch.ones(16)
    batch.backward(loss)


def a_sum(member, batch, inputs, loss):
    batch.backward(member.model(inputs).square().sum())


def not_the_batchs(member, batch, inputs, loss):
    loss.backward()


def none_of_the_first(member, batch, inputs, loss):
    if not batch.untaken:
        batch.backward(loss)


def twice(member, batch, inputs, loss):
    batch.backward(loss)
    if not batch.untaken:
        batch.backward(member.model(inputs).square().mean())


OTHERWISE_HERE = r"otherwise than by batch.backward\(loss\)"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        *((each, OTHERWISE_HERE) for each in (a_term_beside, a_term_after, assigned_before, not_the_batchs)),
        (a_sum, "the loss is a sum over the samples"),
        (none_of_the_first, "made on 5 samples instead of 16"),
        (twice, r"reduced already: call batch\.backward"),
    ],
)
def test_gradients_in_the_librarys_loop(use, words):
    member = Trainee(0, Board(1), BatchPolicy(16, None, 6))

    def make_step(batch):
        for inputs, labels in batch:
            use(member, batch, inputs, cross_entropy(member.model(inputs), labels))
        member.optimizer.step()

    batch = next(steps := member.steps())
    refused(words, lambda: make_step(batch))
    steps.close()
