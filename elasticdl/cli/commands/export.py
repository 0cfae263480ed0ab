"""``elasticdl export``: one file of a checkpoint that many processes have written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from elasticdl.cli.parsing import command
from elasticdl.common.errors import ElasticDLError, UserError

# A process of its own: the command line knows no framework.
_CONVERTER = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch")
_LEAST_FREE = 1 << 20  # bytes; with less the disk is full, of which the converter says something else
_METADATA = ".metadata"
_NO_MODULE = "No module named 'torch'"


@command(
    click.Argument(["folder"], type=click.Path(path_type=Path), help="a checkpoint of torch.distributed.checkpoint"),
    click.Argument(["file"], type=click.Path(path_type=Path), help="the file to write, which torch.load reads"),
    help="Make one file of a checkpoint of torch.distributed.checkpoint, whatever processes have written it. It needs memory for the "
    "whole checkpoint.",
)
def export(folder: Path, file: Path) -> int:
    """
    Raises:
        UserError: there is no such checkpoint, or the file can't be written there.
        ElasticDLError: the checkpoint can't be read.
    """
    try:
        _require_checkpoint(folder)
    except OSError as error:
        raise UserError(f"{folder} can't be read: {error.strerror}") from None
    _require_free(file)
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as aside:
            made = Path(aside, "made")
            done = subprocess.run(
                [sys.executable, *_CONVERTER, str(folder.absolute()), str(made.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode != 0:
                if shutil.disk_usage(aside).free < _LEAST_FREE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise _failure(folder, done.stderr)
            _require_free(file)
            made.replace(file)
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}") from None
    print(file)
    return 0


def _require_free(file: Path) -> None:
    if os.path.lexists(file):
        raise UserError(f"{file} is there: remove it first, or name another file")


def _require_checkpoint(folder: Path) -> None:
    if (folder / _METADATA).is_file():
        return
    found = sorted((path.parent for path in folder.glob(f"*/{_METADATA}")), key=os.path.getmtime)
    if found:
        raise UserError(f"{folder} holds {len(found)} checkpoints: name one of them, as in {found[-1]}, the newest")
    raise UserError(f"{folder} is no checkpoint of torch.distributed.checkpoint, which has a file {_METADATA}")


def _failure(folder: Path, said: str) -> ElasticDLError:
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing was said"]
    if _NO_MODULE in lines[-1]:
        return UserError("export needs torch, which is not installed: run the command where the job's workers run")
    return ElasticDLError(f"{folder} can't be made one file: {lines[-1].strip()}")
