"""The wheel: what is in it, and that it trains, installed in an environment of its own. `make wheel` compares it with the sdist's."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import elasticdl

ROOT = Path(__file__).parents[2]
LINE = """
import torch

custom_model = lambda: torch.nn.Linear(1, 1)
loss = lambda labels, predictions: torch.nn.functional.mse_loss(predictions, labels)
optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
dataset = lambda mode, path: torch.utils.data.TensorDataset(torch.ones(32, 1), torch.ones(32, 1))
"""


def run(*command, **settings):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from what of the checkout a release is built from, uncommitted changes included."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "elasticdl", folder / "elasticdl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/__init__.py", "model_zoo/__init__.py", "elasticdl/__pycache__/entry.cpython-311.pyc"):
        (folder / name).parent.mkdir()  # as they are in a checkout
        (folder / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14 22:13:20
        return release.build(folder, "wheel", tmp_path_factory.mktemp("dist"))


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.slow
def test_it_trains_and_makes_a_page(wheel, tmp_path):
    """Without anything of the checkout; what the package needs is found where the tests have it."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "environment"))
    python = tmp_path / "environment/bin/python"
    run(*(sys.executable, "-m", "pip", "--python", str(python), "install"), "--no-deps", "--no-index", str(wheel))
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "line.py").write_text(LINE)
    options = "--model_zoo . --model_def line --collective torch --num_workers 1 --global_batch_size 8 --max_step 3"
    env = {**os.environ, "ELASTICDL_HOME": str(tmp_path), "PYTHONPATH": ""}
    program = str(python.with_name("elasticdl"))
    assert run(program, "--version").startswith(f"elasticdl {elasticdl.__version__}, Python 3.")
    run(program, "train", "--job_name", "small", *options.split(), cwd=tmp_path, env=env)
    run(program, "report", "small", "--out", "page.html", cwd=tmp_path, env=env)
    assert "plotly.js" in (tmp_path / "page.html").read_text()
    ended = json.loads(run(program, "events", "small", "--json", cwd=tmp_path, env=env).splitlines()[-1])
    assert (ended["event"], ended["phase"], ended["steps"]) == ("job_finished", "succeeded", 3)


def test_what_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        times = {each.date_time for each in files.infolist()}
        info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
        metadata = Metadata.from_email(files.read(f"{info}/METADATA"), validate=True)
        licences = [files.read(f"{info}/licenses/{name}").split()[:2] for name in metadata.license_files]
    assert times == {(2023, 11, 14, 22, 13, 20)}
    assert {name.split("/")[0] for name in names} == {"elasticdl", info}
    assert "elasticdl/py.typed" in names
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []
    assert licences == [[b"Apache", b"License"], [b"MIT", b"License"]]
    assert metadata.description == (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.provides_extra == list(project["optional-dependencies"])
    assert (metadata.name, str(metadata.version)) == ("elasticdl", elasticdl.__version__)
