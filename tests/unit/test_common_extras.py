"""What only some users install, and what is said to who lacks it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TO_GET = r"pip install '\.\[{}\]' in a checkout of elasticdl, or its wheel with \[{}\] \(docs/install\.md\)\n$"
COMMAND = "import sys; from elasticdl.cli.__main__ import main; sys.exit(main({!r}))"


@pytest.mark.parametrize(
    ("missing", "code", "told", "extra"),
    [
        ("numpy", "import elasticdl.elastic.torch", "elasticdl.elastic needs numpy, which is not installed", "worker"),
        ("fsspec", COMMAND.format(["train", "--model_def=digits.mlp_torch", f"--model_zoo={ROOT}/model_zoo"]),
         "elasticdl train: .*fsspec.* is not installed", "worker"),
        ("kubernetes", COMMAND.format(["status", "x", "--namespace=y"]),
         "elasticdl status: jobs on a cluster need the package kubernetes", "kubernetes"),
        ("cryptography", COMMAND.format(["run", "--launcher=slurm", "--", "true"]),
         "elasticdl run: jobs of Slurm need the package cryptography", "slurm"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_that_says_how_to_get_it(tmp_path, missing, code, told, extra):
    """A module that begins so is none in any process of the command."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "ELASTICDL_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search(f"{told}.*: {TO_GET.replace('{}', extra)}", done.stderr)


def test_the_master_and_the_command_line_need_none_of_the_extras():
    missing = ["numpy", "fsspec", "torch", "tensorflow", "kubernetes", "plotly", "cryptography", "urllib3"]
    modules = ["master.shell.serve", "cli.commands.look", "cli.commands.start", "cli.commands.jobs"]
    imports = "; ".join(f"import elasticdl.{name}" for name in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); {imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_tells_to_install_the_package_of_another_project():
    """In messages, examples, images and requirements; the documents' commands are looked at in test_documents.py."""
    folders = ("elasticdl", "model_zoo", "examples", "benchmarks", "docker", "requirements", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".pyc", ".gz")]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    wrong = r"pip3? install (-\S+ )*['\"]?elasticdl\b(?!-)"
    assert [path for path, text in texts.items() if re.search(wrong, text)] == []
    lists = [path for path in texts if path.name.endswith(".txt")]
    assert [path for path in lists if re.search(r"^elasticdl\b", texts[path], re.MULTILINE)] == []
