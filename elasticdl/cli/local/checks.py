"""What is checked before a job is started, so that a mistake costs a line and not a run.

Here is what needs no framework; the rest (module, model, data, Horovod) is checked by
``python -m elasticdl.worker.check`` in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from elasticdl.common import folders
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.spec import JobSpec
from elasticdl.common.startup import RUN_MODULE

FOLDERS_READ = ("model_zoo",)
DATA = ("training_data", "validation_data")

CHECK_MODULE = "elasticdl.worker.check"
CHECK_TIMEOUT = 300.0  # seconds; it imports a framework and the user's module, and opens the data


def with_absolute_paths(spec: JobSpec, cwd: Path) -> JobSpec:
    """The same job with its folders made absolute, as the processes that use them may be started elsewhere.

    URLs are left alone, and so is a value for the data that is not a file here: what it means is up to ``dataset()``.
    """
    changed: dict[str, str] = {}
    for name in (*FOLDERS_READ, *DATA, *folders.WRITTEN):
        value = getattr(spec, name)
        if value and "://" not in value:
            path = cwd / Path(value).expanduser()
            if name not in DATA or path.exists():
                changed[name] = os.path.normpath(path)
    return spec.model_copy(update=changed)


def with_this_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, with a bare ``python`` made the one that elasticdl is installed for.

    Another one on PATH (the virtual environment is not activated) would not find the library.
    """
    return (sys.executable, *command[1:]) if command[0] in ("python", "python3") else command


def require_executable(command: tuple[str, ...]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        hint = f"did you mean `python {program}`?" if program.endswith(".py") else "check its name and PATH"
        raise UserError(f"the program {program} is not found, or not executable: {hint}")


def check_job(spec: JobSpec) -> None:
    """Run the worker's own check of the job in a process.

    Raises:
        UserError: what the check found.
        JobFailedError: the check itself broke.
    """
    command = [*RUN_MODULE, CHECK_MODULE]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=pipe, stdout=nowhere, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(spec.to_json(), timeout=CHECK_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise UserError(f"the check of the model and the data took longer than {CHECK_TIMEOUT:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the check, and what the user's module has started in it
                os.killpg(process.pid, signal.SIGKILL)
    lines = said.strip().splitlines() or ["it said nothing"]
    if process.returncode == 2:
        raise UserError(lines[-1])
    if process.returncode != 0:
        tail = "\n".join(lines[-20:])
        raise JobFailedError(f"the check of the job broke (exit code {process.returncode}); it said:\n{tail}")
