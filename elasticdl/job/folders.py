"""The folders that a job writes to are tried before the job starts: a mistake then costs one line, and not a run."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from elasticdl.common.errors import UserError
from elasticdl.job.spec import JobSpec

WRITTEN = ("checkpoint_dir", "output", "tensorboard_log_dir", "sample_record")


def require_writable_folders(spec: JobSpec) -> None:
    """
    Raises:
        UserError: one of them can't be written.
    """
    for name in WRITTEN:
        value = getattr(spec, name)
        if value and "://" not in value:
            require_writable(f"--{name}", Path(value))


def require_writable(option: str, folder: Path) -> None:
    """Write to the folder, as permission bits do not tell the whole truth, and leave nothing behind."""
    made: list[Path] = []
    try:
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir()
                made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{option} {folder} must be a folder, but it or a part of it is a file") from None
    except OSError as error:
        raise UserError(f"{option} {folder} can't be written: {error.strerror}; choose another folder") from None
    finally:
        with contextlib.suppress(OSError):  # somebody else has put something into it meanwhile
            for path in reversed(made):
                path.rmdir()
