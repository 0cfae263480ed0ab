"""A pass over data that trains nothing: its parts, what becomes of them, and what `evaluate` and `predict` refuse before they begin."""

import io
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch
from front_ends import Script
from job_kit import Job, Lost
from loop_benches import PlainLoop
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.torch.prepare import PlainLoop as Prepares
from elasticdl.elastic.torch_kit.refusals import require_whole
from elasticdl.elastic.training.checkpoint_store import WholeFiles
from elasticdl.elastic.training.parts import Parts, write_npz, write_parquet
from elasticdl.job.spec import JobSpec
from elasticdl.worker import check
from elasticdl.worker.inference import Pass
from elasticdl.worker.learner import batch_policy, build_model
from elasticdl.worker.torch_learner import TorchLearner
from elasticdl.worker.zoo import load_module

MODULE = """
import torch

class Model(torch.nn.Linear):
    puts = "y"

    def forward(self, inputs):
        y = super().forward(inputs)
        return {"y": y, "twice": {"a": {"b": y}, "a.b": y}, "pair": (y, y), "complex": y + 0j}[self.puts]

def custom_model(outputs=1, puts="y"):
    model = Model(2, outputs)
    model.puts = puts
    return model

def dataset(mode, path):
    return [(torch.tensor([1.0 * number, 1.0]), torch.tensor([1.0])) for number in range(20)]

def loss(labels, predictions):
    return (predictions - labels).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture(params=["folder", "memory"])
def files(request, tmp_path):
    return WholeFiles("--output", str(tmp_path / "parts") if request.param == "folder" else "memory://parts", "me")


@pytest.fixture
def parts(files):
    """Two, of three samples and of one."""
    made = Parts(files, 4, 3, lambda: None)
    made.begin()
    pairs = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    whole = {"id": np.arange(4), "pair": pairs, "deep": np.zeros((4, 1, 2), bool)}
    for number, rows in enumerate((slice(0, 3), slice(3, 4))):
        made.write(number, [{name: column[rows] for name, column in whole.items()}])
        made.write(number, [{name: column[rows] for name, column in whole.items()}])  # after a torn step
    made.whole = whole
    assert made.claim()
    assert not made.claim(), "rank 0 was lost over it"
    yield made
    files.remove_all()
    assert files.names() == []


def test_parts_are_put_together_piece_by_piece(parts, tmp_path):
    file = io.BytesIO()
    write_npz(parts, file)
    with np.load(io.BytesIO(file.getvalue())) as found:
        assert {*found} == {*parts.whole}
        for name, column in parts.whole.items():
            np.testing.assert_array_equal(found[name], column, strict=True)
    file = io.BytesIO()
    write_parquet(parts, file)
    table = pyarrow.parquet.read_table(io.BytesIO(file.getvalue()))
    assert {name: table[name].to_pylist() for name in table.column_names} == {
        name: column.tolist() for name, column in parts.whole.items()
    }
    for name, column in parts.mapped(tmp_path).items():
        assert isinstance(column, np.memmap)
        np.testing.assert_array_equal(column, parts.whole[name])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda parts, files: files.remove("part-0000000001.npz"), "part 2 of 2 can't be read"),
        (lambda parts, files: files.write("part-0000000001.npz", lambda file: file.write(b"PK")), "part 2 of 2 can't"),
        (lambda parts, files: parts.write(1, [{"id": np.zeros((1, 5))}]), "differs from sample to sample: .*part 2"),
        (lambda parts, files: parts.write(1, [{"id": np.zeros((1, n))} for n in (2, 3)]), "differs .* the same shape"),
    ],
)
def test_a_part_that_is_lost_or_unlike_the_first_is_named(parts, files, spoil, words):
    with pytest.raises(UserError, match=words):
        write_npz(spoil(parts, files) or parts, io.BytesIO())


def test_a_full_disk_costs_one_line_and_leaves_no_part(parts, files, monkeypatch):
    before = files.names()

    def full(value, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elasticdl.elastic.training.plain_data.write", full)
    with pytest.raises(UserError, match=r"^--output: part 1 of 2 can't be written: No space left"):
        parts.write(0, [parts.whole])
    assert files.names() == before


# -- before it begins --


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The options of a job whose module has a checkpoint."""
    name = f"module_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    kept = tmp_path / "kept"
    kept.mkdir()
    state = {"values": {}, "model": torch.nn.Linear(2, 1).state_dict(), "caches": {}}
    torch.save({"format": 3, "state": state, "origin": {}}, kept / "checkpoint-0000000007.pt")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return {"model_zoo": str(tmp_path), "model_def": name, "checkpoint_dir": str(kept), "job_name": "job"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"task": "predict", "output": "out.npz"}, ""),
        ({"task": "predict", "output": "out.npz", "model_params": "puts='pair'"}, ""),
        ({"task": "predict", "output": "out.npz", "model_params": "puts='twice'"}, "have the same name: .* a.b"),
        ({"task": "predict", "output": "out.parquet", "model_params": "puts='complex'"}, "parquet can't hold"),
        ({"task": "predict"}, "--output is missing.*PredictionOutputsProcessor"),
        ({"task": "predict", "output": "there.npz"}, "--output .*there.npz exists"),
        ({"checkpoint_step": 8}, "holds no checkpoint of step 8"),
        ({"checkpoint_dir": "none"}, "holds no checkpoint"),
        ({"model_params": "outputs=2"}, r"checkpoint-0000000007.pt is not of this model"),
        ({"loss": "custom_model"}, "custom_model.*raised"),
    ],
)
def test_what_cannot_be_done_is_told_before_the_job(trained, given, words, tmp_path):
    (tmp_path / "there.npz").touch()
    paths = {name: str(tmp_path / given[name]) for name in ("output", "checkpoint_dir") if name in given}
    spec = JobSpec(**{"task": "evaluate", **trained, **given, **paths})
    if not words:
        check.check(spec)
        return
    with pytest.raises(UserError, match=words) as error:
        check.check(spec)
    assert "\n" not in str(error.value)


# -- the parts of a pass --


def test_jobs_that_evaluate_the_same_checkpoints_have_parts_of_their_own():
    given = {"task": "evaluate", "checkpoint_dir": "kept"}
    made = [JobSpec(**given, job_name=name).parts for name in ("one", "two")]
    assert made == ["kept/.evaluation.one.parts", "kept/.evaluation.two.parts"]


TAKEN = """
class PredictionOutputsProcessor:
    taken = []

    def process(self, predictions, worker_id):
        self.taken.extend(predictions[:, 0].tolist())
"""


def go_through(options, workers, events=(), breaks=(), **more):
    """By workers in threads; returns the job and what has processed its predictions."""
    spec = JobSpec(**options, minibatch_size=2, num_minibatches_per_task=1, **more)
    module, job = load_module(spec), Job(workers, events)
    models = [build_model(module, spec.seed) for _ in range(workers)]
    job.keeps_states, job.breaks = False, dict(breaks)
    job.run(lambda rank: Pass(spec, job.join(batch_policy(spec)), module, TorchLearner, models[rank]).run())
    return job, module.prediction_outputs_processor


def test_predictions_are_processed_once_though_other_workers_have_their_parts(trained, tmp_path):
    module = tmp_path / f"{trained['model_def']}.py"
    module.write_text(MODULE + TAKEN)
    _, processor = go_through({**trained, "task": "predict"}, 3, {(0, 2): "lost"})
    assert len(processor.taken) == len({*processor.taken}) == 20


def test_what_was_put_together_is_not_again_in_another_world(trained):
    job, _ = go_through({**trained, "task": "evaluate"}, 2, breaks={"elasticdl.complete.head": 1})
    assert len(job.boards) == 2
    assert len(job.lines[0].notices("evaluation")) == 1


# -- a script's own --


class EvaluatesAfterEachEpoch(PlainLoop):
    """``dies_in``: the evaluation in which worker 1 is lost."""

    dies_in, samples = 0, 40

    def train(self, job):
        elastic, self.found, self.passes = Prepares(job), [], []
        self.model, self.optimizer, loader = elastic.prepare(self.model, self.optimizer, self.loader)
        held_out = DataLoader(Subset(self.data, range(self.samples)), batch_size=3)
        metrics = {
            "right": lambda labels, outputs: float((outputs.argmax(1) == labels).sum()),
            "rows": lambda labels, outputs: float(len(labels)),
        }
        for _ in range(self.script.epochs):
            self.go_through(loader, lambda loss: None)
            if job.rank() == 1 and len(self.found) + 1 == self.dies_in:
                job.lose()
            self.model.calls = 0  # which each pass counts, and changes what comes out
            self.found.append(elastic.evaluate(self.model, held_out, metrics))
            self.passes.append(self.model.calls)


@pytest.mark.parametrize("dies_in", [0, 1])
def test_a_plain_loop_evaluates_over_its_workers_and_by_itself_where_one_is_lost(dies_in):
    def run(workers, dies_in=0):
        job, made = Job(workers), [EvaluatesAfterEachEpoch(Script()) for _ in range(workers)]
        made[-1].dies_in = dies_in
        said, _ = job.run(lambda rank: made[rank].train(job))
        return said, [each.found for each in made], [each.passes for each in made]

    _, (alone,), (whole,) = run(1)
    said, (first, other), passes = run(2, dies_in)
    assert whole == [14, 14]
    assert passes == ([[14, 14], []] if dies_in else [[7, 7]] * 2), "each runs its part, and all where another is lost"
    assert [each["rows"] for each in alone] == [40.0, 40.0]
    assert first == alone
    assert other == ([] if dies_in else alone)
    assert isinstance(said[1], Lost) == bool(dies_in)


def test_workers_of_different_data_are_told():
    job, made = Job(2), [EvaluatesAfterEachEpoch(Script()) for _ in range(2)]
    made[1].samples = 30
    said, _ = job.run(lambda rank: made[rank].train(job))
    assert all("the workers' data have 40, 30 samples" in str(each) for each in said), said


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


DATA = [(torch.ones(1), torch.ones(1))] * 5


@pytest.mark.parametrize(
    "loader",
    [
        DATA,
        DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])),
        DataLoader(DATA, batch_sampler=[[0], [1]]),
        DataLoader(DATA, batch_size=2, drop_last=True),
        DataLoader(DATA, batch_size=None),
        DataLoader([], batch_size=2),
        DataLoader(Stream()),
    ],
    ids=["no loader", "part", "batches", "drop_last", "no batches", "empty", "stream"],
)
def test_a_loader_that_does_not_give_each_sample_once_is_refused(loader):
    with pytest.raises(UserError, match="expected a DataLoader of torch's that gives each sample of its data set once"):
        require_whole(loader)


def test_a_loader_may_shuffle():
    require_whole(DataLoader(DATA, batch_size=2, shuffle=True))
