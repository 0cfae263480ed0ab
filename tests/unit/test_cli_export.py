"""One file of a checkpoint that many processes have written, and the mistakes that one line tells."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elasticdl.cli.__main__ import main
from elasticdl.cli.commands import export


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "epochs": 3}
    for name in "12":
        dcp.save(content, checkpoint_id=tmp_path / "out" / name, no_dist=True)
    os.utime("out/2", (2e9, 2e9))
    return tmp_path


def test_the_file_is_what_torch_loads(written, capsys):
    assert main(["export", "out/2", "model.pt"]) == 0
    assert capsys.readouterr().out == "model.pt\n"
    loaded = torch.load("model.pt", weights_only=True)
    assert loaded["epochs"] == 3
    assert torch.equal(loaded["model"]["weight"], torch.arange(6.0).reshape(2, 3))
    assert sorted(os.listdir()) == ["model.pt", "out"]


@pytest.mark.parametrize(
    ("folder", "file", "code", "said"),
    [
        ("out", "m.pt", 2, "out holds 2 checkpoints: name one of them, as in out/2, the newest"),
        ("none", "m.pt", 2, "none is no checkpoint of torch.distributed.checkpoint, which has a file .metadata"),
        ("out/2", "out", 2, "out is there: remove it first, or name another file"),
        ("out/2", "no/m.pt", 2, "no/m.pt can't be written: No such file or directory"),
        ("out/1", "m.pt", 1, "out/1 can't be made one file: "),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_left(written, capsys, folder, file, code, said):
    (written / "out" / "1" / "__0_0.distcp").write_bytes(b"")
    assert main(["export", folder, file]) == code
    told = capsys.readouterr().err
    assert told.startswith(f"elasticdl export: {said}")
    assert told.count("\n") == 1
    assert os.listdir() == ["out"]


def test_a_file_that_has_come_meanwhile_is_not_overwritten(written, capsys, monkeypatch):
    def run(command, **_):
        Path(command[-1]).write_text("made")
        Path("m.pt").write_text("another's")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(export.subprocess, "run", run)
    assert main(["export", "out/2", "m.pt"]) == 2
    assert capsys.readouterr().err.startswith("elasticdl export: m.pt is there: ")
    assert Path("m.pt").read_text() == "another's"
