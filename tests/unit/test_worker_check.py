"""The check before a job: 0 when all is well, else 2, and a last line that says why; and the warm-up pass, which leaves nothing behind."""

import io
import random
import sys

import numpy as np
import pytest
import torch
from worker_kit import function, spec_maker

from elasticdl.job.spec import JobSpec
from elasticdl.worker import check
from elasticdl.worker.learner import largest_micro_batch
from elasticdl.worker.torch_learner import warm_up


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Checks a module with something added; gives exit code, stdout and stderr."""
    make = spec_maker(tmp_path, monkeypatch)

    def checked(extra="", **options):
        monkeypatch.setattr("sys.stdin", io.StringIO(make(extra, **options).to_json()))
        code = check.main()
        said = capfd.readouterr()
        return code, said.out, said.err

    return checked


NOISE = (
    "\nimport os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw out')\nos.write(2, b'raw err')\n"
)
RELUCTANT = """
class Reluctant(torch.nn.Linear):
    def forward(self, inputs):
        if {}:
            raise {}
        return super().forward(inputs)


def custom_model():
    return Reluctant(2, 1)
"""


@pytest.mark.parametrize(
    "extra",
    [
        NOISE,
        # What a worker may be able to do is not refused.
        RELUCTANT.format("not self.training", "ValueError('only in training')"),
        RELUCTANT.format("True", "NotImplementedError('not here')"),
        RELUCTANT.format("True", "RuntimeError('Expected all tensors to be on the same device, but found cuda:0!')"),
    ],
)
def test_nothing_is_said_when_all_is_well(run, extra):
    assert run(extra) == (0, "out\nraw out", "err\nraw err") if extra == NOISE else (0, "", "")


def of_loss(body):
    return function("loss(labels, predictions)", f"return {body}")


FIRST = "given the first samples of dataset('training', '') (features float32 (2, 2)), raised "


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (function("custom_model()", "return {}['width']"), "custom_model() raised KeyError: 'width'"),
        (function("custom_model()", "return 3"), "custom_model() returned int; expected a torch.nn.Module or a keras.Model"),
        (function("optimizer(parameters)", "return 3"), "optimizer(parameters) returned int; expected a torch.optim.Optimizer"),
        (function("dataset(mode, path)", "raise ValueError('no such file: ' + path)"), "dataset('training', ''): no such file:"),
        (function("custom_model()", "return torch.nn.Linear(5, 1)"), FIRST + "RuntimeError: mat1 and mat2 shapes cannot be"),
        (of_loss("torch.nn.functional.nll_loss(predictions, labels)"), "given labels float32 (2, 1) and predictions float32 (2, 1), raised"),
        (of_loss("(labels - predictions) ** 2"), "returned a tensor of shape (2, 1); expected a scalar tensor"),
        (of_loss("((labels - predictions) ** 2).sum()"), "the loss is a sum over the samples"),
        (RELUCTANT.format("len(inputs) != 40", "ValueError('only batches of 40')"), "(features float32 (2, 2)), raised ValueError: only batches of 40"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(run, extra, expected):
    code, out, err = run(NOISE + extra)
    assert (code, out) == (2, "out\nraw out")
    noise, line = err.rstrip("\n").rsplit("\n", 1)
    assert noise == "err\nraw err"
    assert expected in line


def test_runs_two_samples_as_in_training(run, tmp_path):
    seen = "open({!r}, 'a').write(f'{{len(inputs)}} {{self.training}}\\n')".format(str(tmp_path / "seen"))
    assert run(RELUCTANT.format(f"{seen} == 0", "ValueError")) == (0, "", "")
    assert (tmp_path / "seen").read_text() == "2 True\n"


def test_refuses_what_horovod_cannot_bear_and_says_where_it_is_missing(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("HOROVOD_CYCLE_TIME", "1")
        code, _, err = run()
    assert code == 2
    assert "unset HOROVOD_CYCLE_TIME" in err
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    code, _, err = run(collective="horovod")
    assert code == 2
    assert "Horovod with PyTorch is needed" in err
    assert "--collective torch does without" in err
    assert run()[0] == 0, "torch is taken where it is not asked for"


def test_refuses_a_second_history_in_one_folder(run, tmp_path):
    (tmp_path / "checkpoint-0000000007.pt").write_bytes(b"")
    assert run(checkpoint_dir=str(tmp_path))[0] == 0
    code, _, err = run(checkpoint_dir=str(tmp_path), resume=False)
    assert code == 2
    assert "holds checkpoints of an earlier training, up to step 7" in err


class Samples:
    """Draws from every global generator, as augmentation does."""

    def __getitem__(self, index):
        return torch.rand(3) + np.random.rand() + random.random(), torch.tensor([1.0])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.register_buffer("calls", torch.tensor(0))
        self.seen = []

    def forward(self, inputs):
        self.calls += 1
        self.seen.append(inputs.shape)
        return self.layers(inputs).sum(dim=1, keepdim=True)


def draws():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    yield
    yield random.random(), np.random.rand(), torch.rand(1).item()


def warmed(model, loss):
    warm_up(model, loss, Samples(), 6, torch.device("cpu"))


def test_leaves_no_trace():
    model, gradients = Model(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, expected = draws()
    model.layers[0].weight.register_hook(gradients.append)
    next(drawn := draws())
    warmed(model, torch.nn.functional.mse_loss)
    assert next(drawn) == expected
    assert model.seen == [(6, 3)]
    assert len(gradients) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_cleans_up_also_when_the_users_code_raises():
    model = Model()
    with pytest.raises(KeyError):
        warmed(model, lambda labels, predictions: {}["no"])
    assert int(model.calls) == 0


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({"global_batch_size": 100, "max_worker_batch_size": 30}, 1000, 30),
        ({"global_batch_size": 100, "num_workers": "3-4"}, 1000, 34),
        ({"minibatch_size": 20}, 1000, 20),
        ({"minibatch_size": 20, "max_worker_batch_size": 8}, 1000, 8),
        ({}, 1000, 64),
        ({}, 10, 10),
    ],
)
def test_runs_as_many_samples_as_training_will(options, samples, expected):
    assert largest_micro_batch(JobSpec(**options), samples) == expected
