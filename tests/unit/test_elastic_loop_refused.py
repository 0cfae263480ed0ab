"""What a plain loop, or that of the library, can't have is refused in one line: by all workers, and where one is alone."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from elastic_kit import Board, Trainee
from loop_benches import BATCH, PlainScript, TwoOptimizers, each_batch, run
from refusal_kit import refused, require_refusal
from torch.nn import functional as f
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.passes import require_mean
from elasticdl.elastic.torch_kit.refusals import require_plain
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.runtime import ScriptRuntime
from elasticdl.ga.torch.optim import Optimizer

# -- gradients: what is done with a batch, between two of the loader --


LOOKED_AT = r"looked at \(.*loop_benches.py:\d+, .* that elastic.prepare\(\) was not given\) between two backward"
OTHERWISE = "gradients were made otherwise than by loss.backward"
NOT_GIVEN = "^SGD steps while a batch is trained on, and was not given before: .* give it to elastic.prepare, too"

WITH_A_BATCH = {
    "loss().backward(); optimizer.step(); loss().backward()": "called again after optimizer.step",
    "loss().backward(); model.body[0].weight.grad; loss().backward()": LOOKED_AT,
    "loss().backward(); torch.optim.SGD(model.parameters()).step(); loss().backward()": NOT_GIVEN,
    "loss().backward(); optimizer.step(); optimizer.step()": "without a batch from the loader",
    "loss().backward(); optimizer.step()": "the gradients of an earlier batch are still there",
    "autograd.backward(loss()); loss().backward()": OTHERWISE,
    "script.head.bias.grad = ones_like(script.head.bias); optimizer.step()": OTHERWISE,
    "optimizer.step(lambda: autograd.backward(loss()))": OTHERWISE,
    "autograd.grad(outputs=loss(), inputs=model.body[0].bias)": "^torch.autograd.grad.. by a parameter that is trained",
    "mse_loss(model(x), x[:, :3], reduction='sum').backward()": "the loss is a sum over the samples",
    "weight = model.body[0].weight; weight.data.add_(ones_like(weight)); loss().backward(); step()": (
        r"loop_benches.py:\d+: add_ changes a parameter that is trained.* change it after optimizer.step"
    ),
    "model.body[0].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step()); loss().backward(); step()": (
        r"^gradients were .* or used, as by optimizer\.step\(\) in a hook, or changed"
    ),
    "model.own = torch.nn.Parameter(zeros(1)); (loss() + model.own.square().sum()).backward(); optimizer.step();"
    "torch.optim.SGD([model.own]).step()": NOT_GIVEN,
}


def all_refuse(words, loop, workers, **options):
    _, said = run(loop, workers, **options)
    for error in said:
        require_refusal(error, words)


@pytest.mark.parametrize("text", WITH_A_BATCH)
def test_gradients_that_cant_be_right(text):
    for workers in (1, 2):
        all_refuse(WITH_A_BATCH[text], each_batch(text, steps=False), workers)


@pytest.mark.parametrize("text", [*WITH_A_BATCH][:5])
def test_a_script_that_no_master_has_started_is_told_as_well(text):
    words = LOOKED_AT if "torch.optim" in text else WITH_A_BATCH[text]
    all_refuse(words, each_batch(text, steps=False), 1, under_master=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss().backward(); optimizer.step(); loss().backward()", "as for a GAN: a plain loop has one sum"),
        ("loss().backward(); optimizer.step(); optimizer.zero_grad()", "there: .* also of one that does not step"),
    ],
)
def test_gradients_of_several_optimizers(text, words):
    all_refuse(words, each_batch(text, steps=False), 2, kind=TwoOptimizers)


# -- batches --


def train(script, x, y):
    script.loss(x, y).backward()
    script.step()


def fetches_ahead(script):
    """As people's prefetchers do."""
    batches = iter(script.loader)
    following = next(batches)
    while following is not None:
        x, y = following
        following = next(batches, None)
        train(script, x.double().float(), y)


def makes_a_loader_anew(script):
    for _ in range(2):
        for x, y in script.loader:
            train(script, x, y)
        script.loader = DataLoader(script.loader.dataset, batch_size=BATCH)


KEPT = "outside of the loop over the prepared loader, as on next\\(iter\\(loader\\)\\)"


@pytest.mark.parametrize(
    ("loop", "words", "workers"),
    [
        (
            each_batch("if x.shape[0] == 8: loss().backward(); step()", steps=False),
            r"loop_benches.py:\d+.* this worker's part has 4 of its 8 samples.*drop_last=True",
            [2],
        ),
        (fetches_ahead, r"\.py:\d+.* works on a batch after the next one was given, as with a prefetcher", [1, 2]),
        (each_batch("next(iter(script.loader))", steps=False), "looped over twice at once; expected one loop", [1, 2]),
        (lambda script: train(script, *next(iter(script.loader))), KEPT, [1]),
        (makes_a_loader_anew, KEPT, [1, 2]),
    ],
)
def test_batches_that_are_left_out_by_their_size_fetched_ahead_or_kept(loop, words, workers):
    for number in workers:
        all_refuse(words, loop, number)


def test_batches_that_another_thread_fetches():
    def loop(script):
        with ThreadPoolExecutor() as pool:
            train(script, *pool.submit(list, script.loader).result()[0])

    all_refuse("looped over in another thread than the one that trains, as by a background", loop, 1)


# -- what is given to `prepare` --


class Negating(DataLoader):
    def __iter__(self):
        return (-batch for batch in super().__iter__())


def named(name, base, **functions):
    return type(name, (base,), functions)


LINEAR, DATA = torch.nn.Linear(1, 1), PlainScript(None).loader.dataset


def loader(make, *given, **options):
    return lambda: OwnLoader(make(*given, **options))


def model(given):
    return lambda: require_plain(given, SGD(LINEAR.parameters()))


def optimizer(kind):
    return lambda: require_plain(LINEAR, kind(LINEAR.parameters()))


def librarys_state():
    context = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    TorchState(context, LINEAR, torch.optim.LBFGS(LINEAR.parameters()), None, {})


def prepare(*given, **options):
    return lambda: PlainLoop(ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)).prepare(*given, **options)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (loader(list), "the loader is a list"),
        (loader(Negating, DATA), "the loader is a Negating, whose own __iter__ is not called"),
        (loader(named("StatefulDataLoader", DataLoader), DATA), "whose state says nothing"),
        (loader(DataLoader, torch.utils.data.ChainDataset([])), "what is only iterated over can't be divided"),
        (loader(DataLoader, DATA, batch_size=None), r"DataLoader\(batch_size=None\) makes no batches"),
        (loader(DataLoader, DATA, sampler=torch.utils.data.Sampler()), "sampler has no length"),
        (loader(DataLoader, DATA, batch_size=100, drop_last=True), "has no batch"),
        (model([LINEAR]), "the model is a list"),
        (model(torch.nn.Sequential(torch.nn.SyncBatchNorm(3))), "0 is a SyncBatchNorm, which needs a process group"),
        (model(torch.nn.DataParallel(LINEAR)), "the model is a DataParallel: give the module within"),
        (model(named("FullyShardedDataParallel", torch.nn.Linear)(1, 1)), "fully_shard, with --processes_per_worker"),
        (librarys_state, "LBFGS evaluates its closure several times"),
        (optimizer(torch.optim.SparseAdam), "SparseAdam takes sparse gradients alone"),
        (optimizer(named("AcceleratedOptimizer", SGD)), "prepared by accelerate, for its own launcher"),
        (optimizer(named("DistributedOptimizer", SGD, _allreduce_grad_async=None)), "Horovod's DistributedOptimizer"),
        (
            prepare(
                LINEAR,
                Optimizer(SGD(LINEAR.parameters()), 2),
                DataLoader(DATA, batch_size=4),
                SGD([torch.zeros(1, requires_grad=True)]),
            ),
            "one of several optimizers accumulates gradients; let one optimizer have all",
        ),
        (prepare(LINEAR), r"expected prepare\(model, optimizer, loader\)"),
        (prepare(LINEAR, SGD(LINEAR.parameters())), r"expected prepare\(model, optimizer, loader\)"),
        (prepare(LINEAR, None, None, start=1), "there is no argument start; expected prepare"),
    ],
)
def test_what_is_given(use, words):
    refused(words, use)


def test_a_process_group_that_a_library_has_made_of_the_environment_is_explained(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    refused(r"leave init_process_group out, .* the job$", model(LINEAR))
    monkeypatch.setenv("RANK", "0")
    refused("RANK is in the environment, .*: unset it", model(LINEAR))


def test_parameters_that_are_in_no_module_that_was_given():
    model, norm = torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(2)
    optimizer = SGD([*model.parameters(), *norm.parameters()], lr=0.1)
    context = Trainee(0, Board(1), BatchPolicy(16, None)).context
    words = r"^parameters of the optimizer, of the shapes \(2,\), \(2,\), are in no module that was given, "
    refused(words, lambda: LoopState(context, model, optimizer, {}))
    LoopState(context, model, optimizer, {"norm": norm})


def test_a_step_of_the_librarys_loop_that_leaves_a_micro_batch_out():
    member = Trainee(0, Board(1), BatchPolicy(16, None, 6))
    batch = next(steps := member.steps())
    inputs, labels = next(iter(batch))
    batch.backward(cross_entropy(member.model(inputs), labels))
    refused("made on 6 samples instead of 16", member.optimizer.step)
    steps.close()


# -- losses that are no mean over samples, by what autograd knows of them --


SAMPLES = 6
OUT = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
LIKE = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
PENALTY = torch.nn.Parameter(torch.ones(SAMPLES, 4)).pow(2).sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda how: f.cross_entropy(OUT, LABELS, reduction=how),
        lambda how: f.cross_entropy(OUT.view(2, 4, 3), LABELS.view(2, 3), reduction=how),  # of pixels
        *(lambda how, of=of: of(OUT, LIKE, reduction=how) for of in (f.mse_loss, f.l1_loss, f.smooth_l1_loss)),
        lambda how: f.binary_cross_entropy(OUT.sigmoid(), LIKE, reduction=how),
        lambda how: f.binary_cross_entropy_with_logits(OUT, LIKE, reduction=how),
        lambda how: getattr((OUT - LIKE) ** 2, how)(),
    ],
)
def test_a_sum_over_samples_is_refused_and_a_mean_is_not(loss):
    for mean in (loss("mean"), loss("mean") + PENALTY, loss("sum") / SAMPLES + PENALTY):
        require_mean(mean, SAMPLES)
    for whole in (loss("sum"), PENALTY + loss("sum"), -(-loss("sum")).squeeze()):
        refused("the loss is a sum over the samples", partial(require_mean, whole, SAMPLES))
    refused("the loss is a sum", partial(require_mean, loss("sum") * 1024, SAMPLES, is_scaled=True))


@pytest.mark.parametrize(
    "loss",
    [
        (LIKE[:, 0] * (OUT - LIKE).pow(2).mean(1)).sum(),  # by weights that may add up to 1
        *((f.cross_entropy(OUT, LABELS, reduction="none") / SAMPLES).sum(), OUT[:3].pow(2).sum(), LIKE.sum(), None),
        f.cross_entropy(OUT, torch.tensor([0, 1, -100, 3, -100, 1]), weight=torch.tensor([1.0, 2.0, 1.0, 1.0])),
    ],
)
def test_what_may_be_a_mean_is_not_refused(loss):
    require_mean(loss, SAMPLES)
