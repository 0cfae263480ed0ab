"""scripts/release.py: what it adds to the bill of materials. How it builds is in tests/e2e/test_wheel.py."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("release")


def test_the_bill_of_materials_has_plotlys_script_with_its_version(release):
    root = {"ref": "root", "dependsOn": ["rich==15"]}
    bill = {"metadata": {"component": {"bom-ref": "root"}}, "components": [], "dependencies": [root]}
    made = json.loads(release.with_plotly(bill, (ROOT / release.PLOTLY).read_bytes()))
    (plotly,) = made["components"]
    assert f" {plotly['version']}, with its licence" in (ROOT / "CONTRIBUTING.md").read_text()
    assert made["dependencies"] == [
        {"ref": "root", "dependsOn": [plotly["purl"], "rich==15"]},
        {"ref": plotly["bom-ref"]},
    ]


def test_a_script_without_a_version_is_no_silent_gap(release):
    with pytest.raises(release.ReleaseError, match="does not say its version"):
        release.with_plotly({}, gzip.compress(b"/* nothing */"))


def test_all_tools_of_a_release_are_pinned():
    lines = [(ROOT / "requirements" / name).read_text().splitlines() for name in ("release.txt", "lock.txt")]
    named, locked = ([line for line in each if line and not line.startswith("#")] for each in lines)
    assert {line for line in named if "==" not in line} <= {line.partition("==")[0] for line in locked}
