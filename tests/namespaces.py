"""For tests whose processes are in network namespaces of their own."""

import subprocess

import pytest

from benchmarks.storm.__main__ import NAMESPACES

needs_namespaces = pytest.mark.skipif(
    subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine lets nobody have network and mount namespaces",
)
