"""A prepared plain loop: alone it is torch's own; what can't be had is refused; what a script did can be made again."""

import pytest
import torch
from elastic_kit import make_data, make_model
from plain_kit import Script, compare, each_batch, run
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elasticdl.common.credentials import CONNECTED, MASTER, WORKER_ID
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import ALONE, Member, World
from elasticdl.elastic.torch.loop_host import LoopHost, PreparedLoader, speak_to
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.own_loader import GlobalBatch, OwnLoader
from elasticdl.elastic.torch_kit.passes import least_samples
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime


def prepared(model, optimizer, loader, **options):
    """As `elastic.prepare` in a script that runs alone."""
    context = ElasticContext.connect(BatchPolicy(16, None), seed=0, environ={})
    host = LoopHost(context, model, optimizer, OwnLoader(loader), {}, lambda: None, **options)
    speak_to(host, optimizer)
    return PreparedLoader(loader, host), host


def losses_of(prepare, steps_of=1, **options):
    model = make_model(batch_norm=True)
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


@pytest.mark.parametrize(("samples", "sizes"), [(3, [3, 0]), (1, [1, 0]), (4, [2, 2]), (5, [3, 2])])
def test_with_batch_norm_no_part_has_one_sample_if_the_batch_has_more(samples, sizes):
    batch = GlobalBatch(0, 0, 0, list(range(samples)))
    least = least_samples([make_model(batch_norm=True)])
    assert (least, least_samples([torch.nn.Linear(1, 1)])) == (2, 1)
    parts = [batch.plan(2, least).whole_run(rank) for rank in range(2)]
    assert [part.samples for part in parts] == sizes
    assert [index for part in parts for index in part.indices[: part.samples]] == batch.indices


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
    loop._host = LoopHost(job, model, optimizer, OwnLoader(DataLoader(make_data())), {}, lambda: None)
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


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        (torch.optim.Adagrad, 0, ""),  # it has a state from the start
        (torch.optim.Adam, 0, ""),
        *((kind, 1, "the optimizer has a state already") for kind in (torch.optim.Adagrad, torch.optim.Adam)),
    ],
)
def test_an_optimizer_that_has_stepped_has_to_say_with_which_epoch_the_loop_begins(kind, steps, words):
    class Stepped(Script):
        def make_optimizers(self):
            made = kind([*self.model.parameters(), *self.head.parameters()])
            for _ in range(steps):
                self.head.bias.grad = torch.ones(3)
                made.step()
            return [made]

    _, (said,) = run(each_batch("loss().backward()"), 1, kind=Stepped)
    assert words in str(said)
    assert (said is None) is (words == "")


def test_a_copy_of_the_model_is_the_scripts_own(tmp_path):
    def loop(script):
        average = torch.optim.swa_utils.AveragedModel(script.model)
        torch.save(script.model, tmp_path / "model")
        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
            average.update_parameters(script.model)
        assert average(x).shape == torch.load(tmp_path / "model", weights_only=False)(x).shape

    assert run(loop, 1)[1] == (None,)


@pytest.mark.parametrize("within", [lambda model: model, lambda model: lambda x: model(x)])
def test_what_is_compiled_after_prepare_trains_as_on_one_device(within):
    """The model, or a function that calls it."""

    def loop(script):
        output_of = torch.compile(within(script.model), backend="eager")
        for x, y in script.loader:
            cross_entropy(output_of(x), y).backward()
            script.step()

    compare(loop, make=lambda: torch.nn.Linear(8, 3))


def test_outside_the_loop_a_gpus_stream_is_the_scripts_own(monkeypatch):
    stream = [torch.tensor([0])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: stream.__setitem__(0, torch.tensor([seed + 1])))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(stream))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: stream.__setitem__(device, state))

    def loop(script):
        participant = script.host.participant
        for outside in (1, 2):  # the seed of the script; what it has drawn
            for x, y in script.loader:
                assert stream[0] > 2, "seeded for the batch"
                within = list(stream)
                with participant.apart(participant.drawn[0], b"other"):
                    assert stream != within
                assert stream == within, "as when a part is loaded apart, or made again"
                script.loss(x, y).backward()
                script.step()
            assert stream[0] == outside
            stream[0] = torch.tensor([2])

    def begun(script):
        stream[0] = torch.tensor([1])
        next(iter(script.loader))

    monkeypatch.setattr(Script, "begun", begun)
    assert run(loop, 1)[1] == (None,)
