"""Taking a worker's command line apart, and reading from its program what it will import."""

import sys

import pytest

from elasticdl.common.template import CannotFork
from elasticdl.job.spec import JobSpec
from elasticdl.places.preload import imports_of, modules_to_preload, program_of


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-u", "-X", "dev", "t.py"], "option -X of Python"),
        (["-m"], "option -m of Python"),
        (["-u"], "Python is given no program"),
        (["."], ".* is a folder without __main__.py"),
        (["/dev/null"], "/dev/null is no file"),
    ],
)
def test_why_a_program_cannot_be_had_in_a_template_is_told(arguments, why):
    assert program_of([sys.executable, "-u", "-m", "a.b", "-E"]) == "a.b"
    with pytest.raises(CannotFork, match=f"^{why}$"):
        program_of([sys.executable, *arguments])


def test_imports_are_followed_through_the_program_s_own_modules(tmp_path, monkeypatch):
    files = {
        "train.py": "import model, os\nfrom lib import tools\nfrom lib.deep.er import x\n",
        "model.py": "def make():\n    import torch.nn as nn",
        "lib/__init__.py": "",
        "lib/tools.py": "from . import other\nfrom .deep import er",
        "lib/other.py": "import scipy",
        "lib/deep/__init__.py": "import keras",
        "lib/deep/er.py": "from ... import nothing\nfrom ..other import y\nimport train",
    }
    write(tmp_path, files)
    found = imports_of(tmp_path / "train.py")
    assert {"torch.nn", "scipy", "keras", "os"} <= found
    assert not {"model", "lib", "lib.tools", "train"} & found
    monkeypatch.chdir(tmp_path)
    assert "keras" in imports_of("lib.deep.er")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", "mine.py:2 may set OMP_NUM_THREADS, which is read during imports"),
        ("environ.setdefault('KERAS_BACKEND', 'torch')", "may set KERAS_BACKEND"),
        ("os.putenv('PYTORCH_JIT', '0')", "may set PYTORCH_JIT"),
        ("del os.environ['OMP_NUM_THREADS']", "may set OMP_NUM_THREADS"),
        ("chosen = {'OMP_NUM_THREADS': '1'}; os.environ |= chosen", "may set OMP_NUM_THREADS"),
        ("x = (", "is not Python"),
        ("os.environ['MASTER_ADDR'] = 'OMP_NUM_THREADS is read'", ""),  # the program's own business
    ],
)
def test_a_program_that_sets_what_imports_read_or_is_none_is_not_forked(tmp_path, line, why):
    write(tmp_path, {"t.py": "import os\nimport mine\nimport torch", "mine.py": f"import os\n{line}"})
    if why:
        with pytest.raises(CannotFork, match=why):
            imports_of(tmp_path / "t.py")
    else:
        assert "torch" in imports_of(tmp_path / "t.py")


def test_what_is_imported_beforehand_is_the_framework_of_the_program_or_of_its_module_in_the_zoo(tmp_path):
    write(tmp_path, {"t.py": "import elasticdl.elastic.torch as elastic", "plain.py": "import json, numpy"})
    argv = (sys.executable, str(tmp_path / "t.py"))
    assert modules_to_preload(JobSpec(command=argv)) == ["torch", "torch._dynamo", "elasticdl.elastic.torch"]
    assert modules_to_preload(JobSpec(command=(sys.executable, str(tmp_path / "plain.py")))) == []
    keras = JobSpec(model_zoo="model_zoo", model_def="digits.cnn_keras")
    assert modules_to_preload(keras)[0] == "elasticdl.worker.keras_learner"
    with pytest.raises(CannotFork, match="not found"):
        modules_to_preload(JobSpec(model_zoo="model_zoo", model_def="nothing.at_all"))
    with pytest.raises(CannotFork, match="is not"):
        modules_to_preload(JobSpec(command=("sh", "-c", "true")))
