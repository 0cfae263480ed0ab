"""Which scripts may start processes that load data."""

import subprocess
import sys

import pytest

BODY = "from elasticdl.elastic.training.runtime import require_guard\n"


def run(folder, *command):
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("command", [["-m", "package"], ["package"], ["-m", "package.sub"]])
def test_a_package_is_run_without_a_guard_as_nobody_imports_its_main_anew(tmp_path, command):
    for folder in (tmp_path / "package", tmp_path / "package" / "sub"):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "__main__.py").write_text(BODY + "require_guard(1)\n")
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr


def test_a_module_of_a_package_needs_a_guard(tmp_path):
    (tmp_path / "module.py").write_text(BODY + "require_guard(1)\n")
    done = run(tmp_path, "-m", "module")
    assert "module.py:2: with num_workers=1" in done.stderr


@pytest.mark.parametrize(
    "script",
    [
        'try:\n    if __name__ == "__main__":\n        require_guard(1)\nfinally:\n    pass\n',
        "import multiprocessing\nif multiprocessing.parent_process() is None:\n    require_guard(1)\n",
        "main = __name__ == '__main__'\nif main:\n    require_guard(1)\n",
    ],
)
def test_a_guard_is_known_in_many_shapes(tmp_path, script):
    (tmp_path / "script.py").write_text(BODY + script)
    done = run(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
