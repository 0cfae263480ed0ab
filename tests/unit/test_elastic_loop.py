"""A prepared plain loop: alone it is torch's own; what can't be had is refused; what a script did can be made again."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elasticdl.common.environment import CONNECTED, MASTER, WORKER_ID
from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy, MicroBatch
from elasticdl.elastic.core.world import ALONE, Member, World
from elasticdl.elastic.torch.loop_host import LoopHost
from elasticdl.elastic.torch.prepare import PlainLoop, PreparedLoader, _speak_to, schedulers_of
from elasticdl.elastic.torch.tape import CannotRemake, Tape
from elasticdl.elastic.torch.watch import Watch
from elasticdl.elastic.torch_kit.data.draws import Draws
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnCursor, OwnLoader, RandomStreams
from elasticdl.elastic.torch_kit.gpu import HostCopy
from elasticdl.elastic.torch_kit.participant import host as participant_host
from elasticdl.elastic.torch_kit.participant.host import Host, OpenBatch
from elasticdl.elastic.torch_kit.participant.participant import Participant
from elasticdl.elastic.torch_kit.participant.script_position import ScriptPosition
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState
from elasticdl.elastic.torch_kit.reduction.buffers import least_samples
from elasticdl.elastic.torch_kit.refusals import require_plain
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime


def make_data(samples=50):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def prepared(model, optimizer, loader, **options):
    """As `elastic.prepare` in a script that runs alone."""
    context = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    host = LoopHost(context, model, optimizer, OwnLoader(loader), dict, lambda: None, **options)
    _speak_to(host, optimizer)
    return PreparedLoader(loader, host), host


def losses_of(prepare, steps_of=1, **options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(make_data(), batch_size=16, **options)
    loader, host = prepare(model, optimizer, loader) if prepare else (loader, None)
    losses = []
    for _ in range(3):
        for i, (inputs, labels) in enumerate(loader):
            loss = cross_entropy(model(inputs), labels) / steps_of
            loss.backward()
            if (i + 1) % steps_of == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append((i, len(loader), len(inputs), loss.item(), optimizer.param_groups[0]["lr"]))
        losses.append(torch.rand(1).item())  # the script's own random numbers, between two epochs
        scheduler.step()
    if host is not None:
        host.finish()
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"drop_last": True, "shuffle": True, "generator": torch.Generator()},
        {"steps_of": 3, "shuffle": True},  # over the end of an epoch
        {"sampler": torch.utils.data.WeightedRandomSampler(torch.ones(50), 40)},
    ],
)
def test_alone_the_loop_is_that_of_torch_to_the_bit(options):
    generator = options.get("generator", torch.Generator())
    generator.manual_seed(7)
    theirs = losses_of(None, **options)
    generator.manual_seed(7)
    assert losses_of(prepared, **options) == theirs


@pytest.mark.parametrize(("samples", "workers"), [(16, 1), (16, 3), (2, 3), (1, 2), (97, 4)])
def test_the_parts_of_a_batch_are_the_batch(samples, workers):
    batch = GlobalBatch(0, 0, 0, list(range(100, 100 + samples)))
    parts = [batch.plan(workers).whole_run(rank) for rank in range(workers)]
    assert [index for part in parts for index in part.indices[: part.samples]] == batch.indices
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert all(part.indices for part in parts)


@pytest.mark.parametrize(("samples", "sizes"), [(3, [3, 0]), (1, [1, 0]), (4, [2, 2]), (5, [3, 2])])
def test_with_batch_norm_no_part_has_one_sample_if_the_batch_has_more(samples, sizes):
    batch = GlobalBatch(0, 0, 0, list(range(samples)))
    least = least_samples([make_model()])
    parts = [batch.plan(2, least).whole_run(rank) for rank in range(2)]
    assert [part.samples for part in parts] == sizes
    assert [index for part in parts for index in part.indices[: part.samples]] == batch.indices
    assert all(part.indices for part in parts)
    assert least_samples([torch.nn.Linear(1, 1)]) == 1


def participant_in(rank, workers, least):
    """Of a worker in such a world."""
    participant = Participant.__new__(Participant)
    participant._least, participant._in_pieces, participant.data = least, True, SimpleNamespace(load_at_once=list)
    participant.job, participant.position = (
        SimpleNamespace(world=SimpleNamespace(rank=rank, size=workers)),
        ScriptPosition(),
    )
    participant.position.streams[0] = b""
    return participant


@pytest.mark.parametrize(("samples", "most", "sizes"), [(5, 2, [3, 2]), (3, 2, [3]), (6, 2, [2, 2, 2]), (1, 1, [1])])
def test_a_part_that_is_made_again_in_pieces_has_none_of_one_sample_with_batch_norm(samples, most, sizes):
    participant = participant_in(0, 1, least=2)
    before = MicroBatch(list(range(most)), 0.5)
    made = participant.pieces(OpenBatch(GlobalBatch(0, 0, 0, list(range(samples))), before, most=most))
    assert [len(piece.content) for piece in made] == sizes
    assert sum(piece.weight for piece in made) == pytest.approx(1)
    assert [index for piece in made for index in piece.content] == list(range(samples))


@pytest.mark.parametrize(
    ("worker_id", "place", "version", "rank", "expected"),
    [
        (0, (0, 0), 0, 0, 0),  # the job's very first worker
        (1, (0, 0), 0, 0, 1),
        (0, (0, 3), 0, 0, 1),  # the job has trained: it is another's by now
        (2, (4, 1), 0, 0, 1),
        (2, (4, 1), 3, 0, 0),
        (0, (0, 0), 3, 1, 1),
    ],
)
def test_one_worker_at_most_is_the_first_before_there_is_a_world(worker_id, place, version, rank, expected):
    job = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    core = job.session.core
    core.under_master, core.worker_id = True, worker_id
    job.session.jobs_place = lambda: place
    members = tuple(Member(number, "h", 0, False) for number in range(2))
    job.collective.world = World.of(version, members, rank) if version else ALONE
    assert job.known_rank == expected
    runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
    runtime._context = job
    loop = PlainLoop(runtime)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    loop._host = LoopHost(job, model, optimizer, OwnLoader(DataLoader(make_data())), dict, lambda: None)
    assert loop.rank() == (expected or int(place > (0, 0)))  # with a world, too: this one's script has not begun
    assert loop.catching_up() == (place > (0, 0))


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


def test_random_streams_go_on_from_where_they_were():
    captured = RandomStreams.capture()
    drawn = torch.rand(3)
    RandomStreams.restore(captured)
    assert torch.equal(torch.rand(3), drawn)


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1)


def test_processes_that_load_draw_anew_in_each_epoch():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader, _ = prepared(model, optimizer, DataLoader(Drawing(), batch_size=2, num_workers=1))
    drawn = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            drawn += batch.flatten().tolist()
    assert len(set(drawn)) == 8


def test_a_world_that_begins_cuts_no_more_of_an_epoch_than_is_loaded():
    batches = OwnLoader(DataLoader(make_data(), batch_size=2))
    cut = []

    def divide(batch, workers):
        cut.append((batch.number, workers))
        return batch.plan(workers)

    cursor = OwnCursor(batches, batches.order_of(0), divide)
    cursor.take(0, SimpleNamespace(version=1, rank=0, size=2))
    cursor.take(1, SimpleNamespace(version=1, rank=0, size=2))
    cursor.take(2, SimpleNamespace(version=2, rank=1, size=3))
    assert cut == [(0, 2), (1, 2), (2, 3)]
    assert batches.size == 2


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(3))


class Negating(DataLoader):
    def __iter__(self):
        return (-batch for batch in super().__iter__())


class FilteringLoader(DataLoader):
    def _get_iterator(self):
        return filter(None, super()._get_iterator())


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "the loader is a list"),
        (FilteringLoader(make_data()), "the loader is a FilteringLoader, whose own _get_iterator is not called"),
        (Negating(make_data()), "the loader is a Negating, whose own __iter__ is not called"),
        (DataLoader(Endless()), "what is only iterated over can't be divided"),
        (DataLoader(make_data(), batch_size=None), r"DataLoader\(batch_size=None\) makes no batches"),
        (DataLoader(make_data(), sampler=NoLength()), "sampler has no length"),
        (DataLoader(make_data(3), batch_size=4, drop_last=True), "has no batch"),
    ],
)
def test_a_loader_that_cant_be_divided_is_refused(loader, words):
    with pytest.raises(UserError, match=words):
        OwnLoader(loader)


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
def test_a_model_for_other_ways_of_training_is_refused(model, words):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(UserError, match=words) as refused:
        require_plain(model, optimizer)
    assert "\n" not in str(refused.value)


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
def test_an_optimizer_whose_gradients_can_not_be_summed_is_refused(kind, words):
    model = torch.nn.Linear(1, 1)
    optimizer = kind(model.parameters())
    context = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    for use in (lambda: require_plain(model, optimizer), lambda: TorchState(context, model, optimizer, None, {})):
        with pytest.raises(UserError, match=words) as refused:
            use()
        assert "\n" not in str(refused.value)


def test_a_process_group_that_a_library_has_made_of_the_environment_is_explained(monkeypatch):
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"leave init_process_group out, .* find each other through the job$"):
        require_plain(model, torch.optim.SGD(model.parameters()))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK is in the environment, by which libraries do so of themselves: unset it"):
        require_plain(model, torch.optim.SGD(model.parameters()))


def test_schedulers_are_found():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [3])
    assert schedulers_of(optimizer, []) == [whole]
    assert schedulers_of(optimizer, [whole]) == []
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(UserError, match=r"give the optimizer's schedulers along \(ExponentialLR, SequentialLR\)"):
        schedulers_of(optimizer, [])
    assert schedulers_of(optimizer, [other]) == [whole]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda model, optimizer, loss: (optimizer.step(), loss().backward()), "called again after optimizer.step"),
        (lambda model, optimizer, loss: (model[0].weight.grad, loss().backward()), "looked at between two backward"),
        (
            lambda model, optimizer, loss: (optimizer.step(), optimizer.step()),
            "without a batch from the loader that was prepared",
        ),
    ],
)
def test_a_loop_that_cant_be_right_is_refused(wrong, words):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, _ = prepared(model, optimizer, DataLoader(make_data(), batch_size=16))
    inputs, labels = next(batches := iter(loader))

    def loss():
        return cross_entropy(model(inputs), labels)

    loss().backward()
    with pytest.raises(UserError, match=words):
        wrong(model, optimizer, loss)
    batches.close()


def test_gradients_that_are_never_cleared_are_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, _ = prepared(model, optimizer, DataLoader(make_data(), batch_size=16))

    def train():
        for inputs, labels in loader:
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    with pytest.raises(UserError, match="the gradients of the last step are still there"):
        train()


def test_a_copy_of_the_model_is_the_scripts_own(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, _ = prepared(model, optimizer, DataLoader(make_data(), batch_size=16))
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.save(model, tmp_path / "model")
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        average.update_parameters(model)
        average(inputs)
    assert torch.load(tmp_path / "model", weights_only=False)(inputs).shape == (2, 3)


# -- the tape --


class Noting:
    """Notes what a script does with a batch."""

    def __init__(self, model, sample):
        self.tape = Tape(sample)
        self.watch = Watch(model, self)

    def __enter__(self):
        self.watch.start(self.tape)
        return self.tape

    def __exit__(self, *_):
        self.watch.stop()

    def before_look(self, tensor): ...

    def backward(self, loss, kwargs):
        self.tape.note_backward(loss, kwargs)
        loss.backward(**kwargs)


def gradients(model):
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def script_with_autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(batch["pixels"].flatten(1))
        loss = cross_entropy(output.float(), batch["label"])
    with torch.no_grad():
        scale = loss * 0 + 3
    (loss * scale).backward()


def script_of_two_losses(model, batch):
    output = model(batch["pixels"].flatten(1))
    cross_entropy(output, batch["label"]).backward(retain_graph=True)
    loss = output.square().mean()
    loss.backward()
    loss.item()


@pytest.mark.parametrize("script", [script_with_autocast, script_of_two_losses])
def test_what_a_script_did_is_made_again_of_other_samples(script):
    model = make_model()

    def batch(seed, samples):
        generator = torch.Generator().manual_seed(seed)
        return {"pixels": torch.randn(samples, 2, 4, generator=generator), "label": torch.arange(samples) % 3}

    first, other = batch(1, 6), batch(2, 9)
    script(model, other)
    expected = gradients(model)
    model.zero_grad()
    with Noting(model, first) as tape:
        script(model, first)
    model.zero_grad()
    tape.remake(other, lambda loss, kwargs: loss.backward(**kwargs))
    for mine, theirs in zip(gradients(model), expected, strict=True):
        assert torch.equal(mine, theirs)


def script_that_divides_by_size(model, batch):
    (cross_entropy(model(batch[0]), batch[1], reduction="sum") / batch[0].shape[0]).backward()


def script_that_branches(model, batch):
    loss = cross_entropy(model(batch[0]), batch[1])
    if loss > 0:
        loss = loss * 2
    loss.backward()


def script_without_backward(model, batch):
    model(batch[0])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (script_that_divides_by_size, r"test_elastic_loop.py:\d+: __get__ looks at a number before"),
        (script_that_branches, r"test_elastic_loop.py:\d+: __bool__ looks at a number before"),
        (script_without_backward, "there was no loss.backward"),
    ],
)
def test_what_depends_on_more_is_not_made_again(script, words):
    model, batch = make_model(), [torch.randn(6, 8), torch.arange(6) % 3]
    with Noting(model, batch) as tape:
        script(model, batch)
    with pytest.raises(CannotRemake, match=words):
        tape.remake(batch, lambda loss, kwargs: loss.backward(**kwargs))


def test_a_batch_of_more_than_tensors_is_not_made_again():
    model, batch = make_model(), [torch.randn(6, 8), torch.arange(6) % 3, ["a"] * 6]
    with Noting(model, batch) as tape:
        script_that_divides_by_size(model, batch)
    with pytest.raises(CannotRemake, match="the batches hold a str beside tensors"):
        tape.remake(batch, lambda loss, kwargs: loss.backward(**kwargs))


def train_on(loader, model, optimizer, watch=lambda step: None):
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            watch(optimizer)


def begun(stands, join=None, **options):
    """A script that was told where the job stands; ``join(state)`` is what it finds in its first world."""
    random.seed(0)
    np.random.seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=16, **(options or {"shuffle": True}))
    loader, host = prepared(model, optimizer, loader)
    host.job.session.jobs_place = lambda: stands
    real = host.job.join

    def joined(state):
        real(state)
        if join is not None:
            join(state)

    host.job.join = joined
    return model, optimizer, loader, host


@pytest.mark.parametrize("stands", [(0, 0), (0, 3), (1, 0), (1, 2), (1, 3)])
def test_a_newcomer_passes_by_what_it_was_told_of_before_it_joins(stands):
    """It ends with the parameters of the one that has trained all the time."""
    model, optimizer, loader, host = begun((0, 0))
    kept = []

    def watch(_):
        if len(kept) < 7:
            kept.append(copy.deepcopy(host.participant.state.sent()))

    train_on(loader, model, optimizer, watch)
    joined_at = []

    def join(state):
        joined_at.append(passed[0])
        state.load_state_dict(kept[-1])  # that after the third step of the second epoch
        for part in p.SaveScope:  # as when it is sent
            state.save(part)

    passed = [0]
    late, its_optimizer, its_loader, its_host = begun(stands, join)

    def count(_):
        passed[0] += 1

    train_on(its_loader, late, its_optimizer, count)
    assert joined_at == [stands[0] * 4 + stands[1]]
    assert its_host.finish().progress == host.finish().progress
    for ours, theirs in zip(late.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


OF_A_CLOSURE = np.random.default_rng(5)


class OwnOrder(torch.utils.data.Sampler):
    """Draws from generators of its own, of which one can't be found."""

    def __init__(self, kind):
        self.kind = kind
        self.numpy, self.legacy = np.random.default_rng(5), np.random.RandomState(5)
        self.python, self.torch = random.Random(5), torch.Generator().manual_seed(5)
        self.lazy, self.count, self.order = None, 0, list(range(50))
        global OF_A_CLOSURE
        OF_A_CLOSURE = np.random.default_rng(5)

    def __len__(self):
        return 50

    def __iter__(self):
        self.count += 1
        if self.kind == "lazy":
            self.lazy = self.lazy or torch.Generator().manual_seed(5)
        order = {
            "numpy": lambda: self.numpy.permutation(50).tolist(),
            "legacy": lambda: self.legacy.permutation(50).tolist(),
            "python": lambda: self.python.sample(range(50), 50),
            "torch": lambda: torch.randperm(50, generator=self.torch).tolist(),
            "lazy": lambda: torch.randperm(50, generator=self.lazy).tolist(),
            "count": lambda: np.random.default_rng(self.count).permutation(50).tolist(),
            "in place": lambda: random.Random(3).shuffle(self.order) or list(self.order),
            "closure": lambda: OF_A_CLOSURE.permutation(50).tolist(),
        }
        return iter(order[self.kind]())


OWN_ORDERS = ["loader", "numpy", "legacy", "python", "torch", "lazy", "count", "in place"]


def options_of(kind):
    if kind == "loader":
        return {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return {"sampler": OwnOrder(kind)}


@pytest.mark.parametrize("stands", [(0, 2), (1, 0), (1, 3)])
@pytest.mark.parametrize("kind", [*OWN_ORDERS, "closure"])
def test_a_newcomer_draws_the_order_that_the_others_have_drawn(kind, stands):
    model, optimizer, loader, host = begun((0, 0), **options_of(kind))
    kept, orders = [], {}

    def watch(_):
        if len(kept) < 7:
            kept.append(copy.deepcopy(host.participant.state.sent()))
        orders[host.participant.drawn[0].epoch] = [batch.indices for batch in host.participant.drawn]

    train_on(loader, model, optimizer, watch)

    def join(state):
        state.load_state_dict(kept[-1])  # that after the third step of the second epoch
        for part in p.SaveScope:  # as when it is sent
            state.save(part)

    late, its_optimizer, its_loader, its_host = begun(stands, join, **options_of(kind))
    drawn = {}
    train_on(
        its_loader,
        late,
        its_optimizer,
        lambda _: drawn.update({its_host._order.drawn[0].epoch: [batch.indices for batch in its_host._order.drawn]}),
    )
    assert drawn == orders
    for ours, theirs in zip(late.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", OWN_ORDERS)
def test_what_an_order_is_drawn_from_is_put_into_a_loader_that_has_not_drawn(kind):
    ours, theirs = (DataLoader(make_data(), batch_size=10, **options_of(kind)) for _ in range(2))
    for _ in range(2):
        list(theirs.batch_sampler)
    captured = Draws(theirs).capture()
    Draws(ours).restore(captured)
    assert list(ours.batch_sampler) == list(theirs.batch_sampler)


def test_a_worker_without_a_sample_makes_a_torn_step_again_on_those_of_another():
    """An empty batch is none that a script could take."""
    participant, batch = participant_in(2, 3, least=1), GlobalBatch(0, 0, 0, [7, 8])
    (piece,) = participant.pieces(OpenBatch(batch, batch.plan(1).whole_run(0)))
    assert (piece.content, piece.weight, piece.samples) == ([7], 0.0, 0)


def test_answers_of_a_step_that_was_made_are_none_that_a_newcomer_hears():
    participant = Participant.__new__(Participant)
    participant.open_batches, participant.position, participant.is_reduced, participant._host = (
        [],
        ScriptPosition(),
        True,
        Host(),
    )
    participant.position.answers.begin_step(1)
    participant.position.answers.add(2.5)
    participant.close()
    participant.position.answers.begin_step(1)
    assert not participant.position.answers.known(0)


@pytest.mark.filterwarnings("error")
def test_a_newcomers_scheduler_does_not_miss_the_steps_that_others_have_made():
    """torch warns where a scheduler steps, and the optimizer's own step was not called before."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader, host = prepared(model, optimizer, DataLoader(make_data(), batch_size=16))
    host.job.session.jobs_place = lambda: (0, 2)
    for inputs, labels in loader:
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        break
    assert host.is_idle


@pytest.mark.parametrize(
    ("told", "epochs", "batches"), [((1, 2), 1, 0), ((1, 2), 1, 1), ((0, 2), 1, 0), ((0, 2), 0, 3)]
)
def test_a_newcomer_whose_script_ends_on_stand_ins_does_not_end_the_job(told, epochs, batches):
    """It has judged what is not the job's; at ``told`` it would have joined."""
    model, optimizer, loader, host = begun((0, 0))
    kept = []
    train_on(loader, model, optimizer, lambda _: kept.append(copy.deepcopy(host.participant.state.sent())))

    def join(state):
        state.load_state_dict(kept[6])  # that after the third step of the second epoch
        for part in p.SaveScope:  # as when it is sent
            state.save(part)

    late, its_optimizer, its_loader, its_host = begun(told, join)
    said = []
    its_host.job.fail = lambda message, traceback, *, users: said.append((message, users))
    its_host._on_left = lambda: said.append("left")
    for _ in range(epochs):
        for inputs, labels in its_loader:
            cross_entropy(late(inputs), labels).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    if batches:
        for number, (inputs, labels) in enumerate(its_loader):
            cross_entropy(late(inputs), labels).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
            if number + 1 == batches:
                break
    assert its_host.finish() is None
    (message, users), left = said
    assert message.count("\n") == 0
    assert "where the job stands in epoch 2" in message
    assert not users
    assert left == "left"


def test_a_newcomer_that_finds_less_than_it_was_told_is_started_again():
    model, optimizer, loader, host = begun((1, 2))
    told = []
    host.job.fail = lambda message, traceback, *, users: told.append((message, users))
    with pytest.raises(SystemExit) as ended:
        train_on(loader, model, optimizer)
    assert ended.value.code == 1
    ((message, users),) = told
    assert "started again" in message
    assert not users


def test_a_loss_is_on_its_way_to_the_host_before_the_backward_pass_and_read_after_it(monkeypatch):
    happened = []

    class Copy(HostCopy):
        def __init__(self, *given):
            happened.append("begun")
            super().__init__(*given)

        def wait(self):
            happened.append("read")
            return super().wait()

    monkeypatch.setattr(participant_host, "HostCopy", Copy)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, host = prepared(model, optimizer, DataLoader(make_data(16), batch_size=16))
    for inputs, labels in loader:
        hidden = model[:1](inputs)
        hidden.register_hook(lambda _: happened.append("backward"))
        cross_entropy(model[1:](hidden), labels).backward()
        optimizer.step()
    host.finish()
    assert happened == ["begun", "backward", "read"]


def test_a_loss_that_is_not_the_one_of_the_pass_is_read_as_it_is():
    given, loss = OpenBatch(GlobalBatch(0, 0, 0, ()), None), torch.tensor([2.0, 4.0])
    given.begin_loss(loss)
    given.add_loss(loss.detach(), 0.5)
    given.begin_loss(loss)
    given.add_loss(loss.mul_(2), 0.25)
    given.begin_loss(loss)
    given.add_loss(loss * 2, 0.25)
    given.add_loss(torch.tensor(1.0), 1.0)
    assert given.objective == 3.0 + 3.0 + 6.0 + 1.0
