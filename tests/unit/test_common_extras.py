"""What only some users install, and what is said to who lacks it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl.cli import folder_run
from elasticdl.common.errors import UserError
from elasticdl.job.spec import JobSpec

ROOT = Path(__file__).parents[2]


def run(code, **more):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize(("missing", "program"), [("numpy", "torch"), ("fsspec", "keras")])
def test_what_a_script_lacks_is_one_line(missing, program):
    done = run(f"import sys; sys.modules['{missing}'] = None; import elasticdl.elastic.{program}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith(
        f"elasticdl.elastic needs {missing}, which is not installed: pip install '.[worker]' in a checkout of elasticdl, "
        "or its wheel with [worker] (docs/install.md)\n"
    )


def test_what_a_worker_lacks_is_one_line_before_the_job_starts():
    spec = JobSpec(model_zoo=str(ROOT / "model_zoo"), model_def="digits.mlp_torch").to_json()
    code = "import sys; sys.modules['fsspec'] = None; from elasticdl.worker.check import main; sys.exit(main())"
    done = run(code, input=spec)
    assert (done.returncode, done.stderr.strip().count("\n")) == (2, 0)
    assert re.search(r"fsspec.* is not installed.*: pip install '\.\[worker\]' ", done.stderr)


def test_the_master_and_the_command_line_need_none_of_the_extras():
    missing = ["numpy", "fsspec", "torch", "tensorflow", "kubernetes", "pyarrow", "sklearn", "plotly", "tensorboardX"]
    missing += ["cryptography", "prometheus_client", "urllib3"]
    modules = ["master.shell.serve", "cli.commands.look", "cli.commands.start", "cli.commands.jobs"]
    imports = "; ".join(f"import elasticdl.{name}" for name in modules)
    done = run(f"import sys; sys.modules.update(dict.fromkeys({missing})); {imports}")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_job_of_slurm_lacks_is_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "elasticdl.common.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r"^jobs of Slurm need the package cryptography: pip install '\.\[slurm\]' "):
        folder_run.run_on_slurm(JobSpec(), detach=True)


def test_nothing_tells_to_install_the_package_of_another_project():
    """In messages, examples, images and requirements; the documents' commands are looked at in test_documents.py."""
    folders = ("elasticdl", "model_zoo", "examples", "benchmarks", "docker", "requirements", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".pyc", ".gz")]
    texts = {path: path.read_text(errors="replace") for path in paths if path.is_file()}
    assert ROOT / "docker/Dockerfile.cpu" in texts
    wrong = r"pip3? install (-\S+ )*['\"]?elasticdl\b(?!-)"
    assert [path for path, text in texts.items() if re.search(wrong, text)] == []
    required = r"^elasticdl\b"
    lists = [path for path in texts if path.name.endswith(".txt")]
    assert [path for path in lists if re.search(required, texts[path], re.MULTILINE)] == []
