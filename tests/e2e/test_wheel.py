"""The wheel, installed in an environment of its own."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 60_000_000


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")  # setuptools leaves folders in the tree that it builds from
    for name in ("pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "elasticdl", source / "elasticdl", ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(source / "dist"))
    run(sys.executable, "-m", "pip", "wheel", *options, str(source))
    (made,) = (source / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Without anything of the checkout; what the package needs is found where the tests have it."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin/python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    )
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_the_command_runs(environment):
    assert run(str(environment / "bin/elasticdl"), "--help").startswith("usage: elasticdl COMMAND")
    assert "--num_workers" in run(str(environment / "bin/elasticdl"), "train", "--help")


def test_a_page_is_made_of_what_the_wheel_holds(environment):
    code = (
        "import elasticdl, sys; from elasticdl.report.page import live_page, plotly_script; "
        "assert elasticdl.__file__.startswith(sys.prefix), elasticdl.__file__; "
        "print(plotly_script()[:40], live_page('j', 'job', ''), live_page('', 'overview', ''))"
    )
    assert "plotly.js" in run(str(environment / "bin/python"), "-I", "-c", code)


def test_the_licence_of_what_is_not_ours_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as files:
        (licence,) = [name for name in files.namelist() if "/licenses/" in name]
        assert files.read(licence).startswith(b"MIT License")


def test_the_core_is_small(environment):
    """Without a framework: everything that `pip install` brings, compiled modules included."""
    (packages,) = environment.glob("lib/python*/site-packages")
    sizes = {"elasticdl": sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0].lower().replace("_", "-")
        if name not in sizes:
            found = importlib.metadata.distribution(name)
            files = (Path(str(found.locate_file(file))) for file in found.files or ())
            sizes[name] = sum(path.stat().st_size for path in files if path.is_file())
            wanted += [line for line in found.requires or () if not re.search("extra|platform|python_version", line)]
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes.items(), key=lambda each: -each[1])
    assert not {"numpy", "plotly", "torch", "tensorflow"} & set(sizes)
