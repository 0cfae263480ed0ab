"""The wheel, installed in an environment of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import elasticdl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EPOCH = "1700000000"  # 2023-11-14 22:13:20

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


spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
RELEASE = importlib.util.module_from_spec(spec)
spec.loader.exec_module(RELEASE)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What of the checkout a release is built from, uncommitted changes included."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "elasticdl", folder / "elasticdl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "model_zoo", "elasticdl/__pycache__"):  # as they are in a checkout
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "elasticdl/__pycache__/entry.cpython-311.pyc").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
        return RELEASE.build(source, "wheel", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Without anything of the checkout; what the package needs is found where the tests have it."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, str(wheel))
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_it_trains_and_makes_a_page(environment, tmp_path):
    (tmp_path / "line.py").write_text(LINE)
    options = "--model_zoo . --model_def line --collective torch --num_workers 1 --global_batch_size 8 --max_step 3 --output out"
    env = {**os.environ, "ELASTICDL_HOME": str(tmp_path), "PYTHONPATH": ""}
    program = str(environment / "bin/elasticdl")
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
        kind = files.read(f"{info}/WHEEL").decode()
        licences = [files.read(f"{info}/licenses/{name}").split()[:2] for name in metadata.license_files]
    assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in kind
    assert times == {(2023, 11, 14, 22, 13, 20)}
    assert {name.split("/")[0] for name in names} == {"elasticdl", info}
    assert "elasticdl/py.typed" in names
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []
    assert licences == [[b"Apache", b"License"], [b"MIT", b"License"]]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.provides_extra == list(PROJECT["optional-dependencies"])
    assert (metadata.name, str(metadata.version)) == ("elasticdl", elasticdl.__version__)


def test_the_sdist_builds_the_same_wheel_and_has_nothing_of_its_builder(source, wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    sdist = RELEASE.build(source, "sdist", tmp_path)
    RELEASE.normalise(sdist, int(EPOCH))
    with tarfile.open(sdist) as files:
        members = files.getmembers()
    assert {(each.mtime, each.uid, each.uname) for each in members} == {(int(EPOCH), 0, "")}
    assert {each.mode for each in members} == {0o644, 0o755}
    assert sdist.read_bytes()[4:8] == int(EPOCH).to_bytes(4, "little")
    assert [each.name for each in members if "/tests" in each.name or "/model_zoo" in each.name] == []
    tree = RELEASE.unpack(sdist, tmp_path / "unpacked")
    RELEASE.compare(wheel, RELEASE.build(tree, "wheel", tmp_path / "again"))
