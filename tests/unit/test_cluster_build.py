"""Without the programs of a cluster, as where a Go is missing what it needs, its tests are skipped, and it is told how many."""

import os
import subprocess
import sys
from pathlib import Path

GO = "#!/bin/sh\n[ $1 = env ] && echo go1.99.0 && exit\necho 'dial tcp: no such host'\nexit 1\n"
CASE = 'pytest_plugins = ["tests.cluster.fixtures"]\ndef test_one(cluster): pass\ndef test_none(): pass\n'


def test_without_programs_tests_on_a_cluster_are_skipped_and_counted(tmp_path):
    (tmp_path / "go").write_text(GO)
    (tmp_path / "go").chmod(0o755)
    (tmp_path / "conftest.py").write_text("from tests.cluster.session import pytest_terminal_summary\n")
    (tmp_path / "test_case.py").write_text(CASE)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "test_case.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "tests on a cluster that were skipped: 1: Go's modules are not to be had: dial tcp: no such" in done.stdout
