"""The check before a job: silent when all is well, else one line and 2."""

import io
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from worker_kit import write_zoo

from elasticdl.common.spec import JobSpec
from elasticdl.worker import check

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Checks a module with something added; gives exit code, stdout and stderr."""
    monkeypatch.setattr("sys.path", list(sys.path))

    def checked(extra="", **options):
        name = f"zoo_{uuid.uuid4().hex}"
        zoo = write_zoo(tmp_path / "zoo", extra, name=name)
        spec = JobSpec(model_zoo=str(zoo), model_def=name, **options)
        monkeypatch.setattr("sys.stdin", io.StringIO(spec.to_json()))
        code = check.main()
        said = capfd.readouterr()
        return code, said.out, said.err

    return checked


def test_silent_when_all_is_well_however_noisy_the_module(run):
    noise = "\nimport os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw out')\nos.write(2, b'raw err')\n"
    assert run(noise) == (0, "", "")


def function(name, body):
    parameters = {"optimizer": "parameters", "dataset": "mode, path"}.get(name, "")
    return f"\nimport sys\nprint('noise', file=sys.stderr)\ndef {name}({parameters}):\n    {body}\n"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (function("custom_model", "return {}['width']"), "custom_model() raised KeyError: 'width'"),
        (function("custom_model", "return 3"), "custom_model() returned int; expected a torch.nn.Module or a keras.Model"),
        (function("optimizer", "return 3"), "optimizer(parameters) returned int; expected a torch.optim.Optimizer"),
        (function("callbacks", "return 3"), "callbacks() raised TypeError: 'int' object is not iterable"),
        (function("eval_metrics_fn", "return [1]"), "eval_metrics_fn() returned list; expected a dict of functions"),
        (function("dataset", "raise ValueError('no such file: ' + path)"), "dataset('training', ''): no such file:"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(run, extra, expected):
    code, out, err = run(extra)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err


def test_names_the_users_line(run):
    _, _, err = run("\ndef inner():\n    return 1 / 0\ndef custom_model():\n    return inner()\n")
    path, line, _ = err.split(":", 2)
    assert Path(path).read_text().splitlines()[int(line) - 1] == "    return 1 / 0"


def test_refuses_what_horovod_cannot_bear(run, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    code, _, err = run()
    assert code == 2
    assert "unset HOROVOD_CYCLE_TIME" in err


def test_says_that_horovod_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    code, _, err = run()
    assert code == 2
    assert "Horovod with PyTorch is needed" in err


def test_refuses_a_second_history_in_one_folder(run, tmp_path):
    (tmp_path / "checkpoint-0000000007.pt").write_bytes(b"")
    assert run(checkpoint_dir=str(tmp_path))[0] == 0
    code, _, err = run(checkpoint_dir=str(tmp_path), resume=False)
    assert code == 2
    assert "holds checkpoints of an earlier training, up to step 7" in err


def test_as_a_process():
    spec = JobSpec(model_zoo=str(REPOSITORY / "model_zoo"), model_def="digits.cnn_tosch")
    command = [sys.executable, "-m", "elasticdl.worker.check"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=spec.to_json(), capture_output=True, text=True, timeout=120, env=environment, cwd=REPOSITORY
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "--model_def digits.cnn_tosch: there is no model_zoo/digits/cnn_tosch.py; did you mean digits.cnn_torch?\n"
    )
