"""What only some users install, and what is said to who lacks it."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_MEBIBYTES = 60
BLOCK = 4096


@pytest.mark.parametrize(("missing", "program"), [("numpy", "torch"), ("fsspec", "keras")])
def test_what_a_script_lacks_is_one_line(missing, program):
    code = f"import sys; sys.modules['{missing}'] = None; import elasticdl.elastic.{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"elasticdl.elastic needs {missing}, which is not installed: pip install '.[worker]' in a checkout of elasticdl, "
        "or its wheel with [worker] (docs/install.md)\n"
    )
    assert done.stderr.count("\n") == 1


def test_the_master_and_the_command_line_need_none_of_the_extras():
    missing = ["numpy", "fsspec", "torch", "tensorflow", "kubernetes", "pyarrow", "sklearn", "plotly", "tensorboardX"]
    modules = ["master.shell.local_master", "cli.commands.look", "cli.commands.start", "cli.commands.jobs"]
    imports = "; ".join(f"import elasticdl.{name}" for name in modules)
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); {imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_message_names_the_package_of_another_project():
    texts = {path: path.read_text() for path in (ROOT / "elasticdl").rglob("*.py")}
    assert [path for path, text in texts.items() if re.search(r"pip install .?elasticdl", text)] == []


def test_the_core_is_small():
    """Without a framework: everything that `pip install` brings, compiled modules included, as `du` counts it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes = {"elasticdl": size_of_package()}
    wanted = [name_of(line) for line in project["dependencies"]]
    while wanted:
        name = wanted.pop()
        if name in sizes:
            continue
        found = importlib.metadata.distribution(name)
        sizes[name] = sum(on_disk(found.locate_file(file)) for file in found.files or ())
        wanted += [name_of(line) for line in found.requires or () if needed(line)]
    heaviest = sorted(sizes.items(), key=lambda each: -each[1])
    assert sum(sizes.values()) < MOST_MEBIBYTES << 20, heaviest
    assert not {"numpy", "plotly", "torch", "tensorflow"} & set(sizes)


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def needed(requirement):
    marker = requirement.partition(";")[2]
    return not marker or ("extra" not in marker and "python_version" not in marker and "platform" not in marker)


def size_of_package():
    """With a compiled module, about as large, for each."""
    files = [path for path in (ROOT / "elasticdl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sum(on_disk(path) * (2 if path.suffix == ".py" else 1) for path in files)


def on_disk(path):
    try:
        return -(-Path(path).stat().st_size // BLOCK) * BLOCK
    except OSError:  # a compiled module that is not there
        return 0
