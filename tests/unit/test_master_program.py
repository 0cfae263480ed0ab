"""Taking a worker's command line apart, and reading from its program what it will import."""

import sys

import pytest

from elasticdl.common.template import CannotFork
from elasticdl.job.spec import JobSpec
from elasticdl.places.preload import OF_SCRIPTS, imports_of, modules_to_preload, program_of


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["{f}", "-c", "x"], None),
        (["-u", "{f}", "-m"], None),
        (["-u", "-m", "a.b", "-E"], "a.b"),
    ],
)
def test_the_program_is_found_among_the_options(tmp_path, arguments, module):
    write(tmp_path, {"t.py": ""})
    script = tmp_path / "t.py"
    argv = [sys.executable, *(each.replace("{f}", str(script)) for each in arguments)]
    assert program_of(argv) == (module or script)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-I", "{f}"], "option -I of Python"),
        (["-u", "-X", "dev", "{f}"], "option -X of Python"),
        (["-m"], "option -m of Python"),
        (["-c", "import torch"], "option -c of Python"),
        (["--check-hash-based-pycs", "always", "{f}"], "option --check-hash-based-pycs of Python"),
        (["-u"], "Python is given no program"),
        (["."], ".* is a folder without __main__.py"),
        (["/dev/null"], "/dev/null is no file"),
        (["-"], "option - of Python"),
    ],
)
def test_what_can_not_be_had_in_a_template_is_told(tmp_path, arguments, reason):
    write(tmp_path, {"t.py": ""})
    with pytest.raises(CannotFork, match=f"^{reason}$"):
        program_of([sys.executable, *(each.replace("{f}", str(tmp_path / "t.py")) for each in arguments)])


def test_only_this_python_counts(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    for other in ("sh", str(tmp_path / "python")):
        with pytest.raises(CannotFork, match="is not"):
            program_of([other, "-c", "import torch"])


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
    ("line", "variable"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", "OMP_NUM_THREADS"),
        ("environ.setdefault('KERAS_BACKEND', 'torch')", "KERAS_BACKEND"),
        ("os.environ.update(TF_USE_LEGACY_KERAS='1')", "TF_USE_LEGACY_KERAS"),
        ("os.environ.update({'A': 'b', 'MKL_NUM_THREADS': '1'})", "MKL_NUM_THREADS"),
        ("os.putenv('PYTORCH_JIT', '0')", "PYTORCH_JIT"),
        ("del os.environ['OMP_NUM_THREADS']", "OMP_NUM_THREADS"),
        ("for name in ('A', 'OMP_NUM_THREADS'): os.environ[name] = '1'", "OMP_NUM_THREADS"),
        ("chosen = {'OMP_NUM_THREADS': '1'}; os.environ |= chosen", "OMP_NUM_THREADS"),
    ],
)
def test_a_program_that_sets_what_imports_read_is_not_forked(tmp_path, line, variable):
    write(tmp_path, {"t.py": "import os\nimport mine\nimport torch", "mine.py": f"import os\n{line}"})
    with pytest.raises(CannotFork, match=f"mine.py:2 may set {variable}, which is read during imports"):
        imports_of(tmp_path / "t.py")


def test_other_variables_are_the_program_s_own_business(tmp_path):
    text = "import os\nos.environ['MASTER_ADDR'] = 'OMP_NUM_THREADS is read'\nimport torch"
    write(tmp_path, {"t.py": text})
    assert "torch" in imports_of(tmp_path / "t.py")


@pytest.mark.parametrize(("text", "reason"), [("x = (", "is not Python"), ("\0", "is not Python")])
def test_a_program_that_can_not_be_read_is_started_plainly(tmp_path, text, reason):
    write(tmp_path, {"t.py": text})
    with pytest.raises(CannotFork, match=reason):
        imports_of(tmp_path / "t.py")


def test_what_is_imported_beforehand_is_the_framework_of_the_program(tmp_path, monkeypatch):
    write(tmp_path, {"t.py": "import elasticdl.elastic.torch as elastic", "plain.py": "import json, numpy"})
    argv = (sys.executable, str(tmp_path / "t.py"))
    assert modules_to_preload(JobSpec(command=argv)) == ["torch", "torch._dynamo", "elasticdl.elastic.torch"]
    assert modules_to_preload(JobSpec(command=(sys.executable, str(tmp_path / "plain.py")))) == []
    with pytest.raises(CannotFork, match="is not"):
        modules_to_preload(JobSpec(command=("sh", "-c", "true")))


@pytest.mark.parametrize(("imported", "modules"), OF_SCRIPTS.items())
def test_tensorflow_is_never_imported_before_triton(imported, modules):
    if {"tensorflow", "keras"} & set(modules):
        assert modules[0] == "elasticdl.triton_first:import_triton"


@pytest.mark.parametrize("model_def", ["digits.cnn_torch", "digits.cnn_torch.custom_model", "digits.cnn_keras"])
def test_so_it_is_for_a_model_zoo_module(model_def):
    found = modules_to_preload(JobSpec(model_zoo="model_zoo", model_def=model_def))
    assert found[0] == f"elasticdl.worker.{'keras' if 'keras' in model_def else 'torch'}_learner"
    with pytest.raises(CannotFork, match="not found"):
        modules_to_preload(JobSpec(model_zoo="model_zoo", model_def="nothing.at_all"))
