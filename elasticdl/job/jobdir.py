"""The directory of a local job: how commands find a job without an address being typed.

<user state dir>/elasticdl/jobs/NAME/        mode 0700
    job.json       the specification
    starter.json   the process of the command that starts the job, until there is a master
    master.json    address, token and process of the master; removed when it has ended and status.json was written
    journal.jsonl  the journal
    earlier.jsonl  the journals of the jobs that this one goes on from, one after the other
    status.json    the last status, written when the job has ended
    state.json     what the next master must know, where there may be one
    batch          the number of the master's batch job, where that is one
    tls/ROLE/      certificates, where workers are on other machines
    stopped-...    the state that its training was stopped with, see `STOPPED_STEM`
    logs/          master.log, worker-N.log; worker-N.out where what a worker prints on stdout is kept apart
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import platformdirs
import psutil
from pydantic import Field, TypeAdapter

from elasticdl.common.credentials import Credentials, Endpoint, PathBelow, TlsFolder, Token
from elasticdl.common.errors import UserError
from elasticdl.job.spec import EVALUATE, TRAIN, JobSpec

if TYPE_CHECKING:
    from google.protobuf.message import Message

# The folders that a job writes to are tried before the job starts: a mistake then costs one line, and not a run.


WRITTEN = ("checkpoint_dir", "output", "tensorboard_log_dir", "sample_record")


def require_writable_folders(spec: JobSpec) -> None:
    """
    Raises:
        UserError: one of them can't be written.
    """
    for name in WRITTEN:
        value = getattr(spec, name)
        if not value or "://" in value:
            continue
        # Without training the output is a file, and checkpoints are only read, but for metrics that are put beside them.
        if name == "output" and spec.task != TRAIN:
            require_writable(f"--{name}", Path(value).parent)
        elif name != "checkpoint_dir" or spec.task == TRAIN or (spec.task == EVALUATE and not spec.output):
            require_writable(f"--{name}", Path(value))


def require_writable(option: str, folder: Path) -> None:
    """Write to the folder, or where it will be made: permission bits do not tell the whole truth. Nothing is left behind."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except NotADirectoryError:
        raise UserError(f"{option} {folder} must be a folder, but it or a part of it is a file") from None
    except OSError as error:
        raise UserError(f"{option} {folder} can't be written: {error.strerror}; choose another folder") from None


_START = 19  # of the fields after the name, which ends with the last bracket: see proc(5), field 22


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """How to reach a running master, and whether its process still runs."""

    address: str  # host:port
    token: str
    pid: Annotated[int, Field(strict=True, gt=0, lt=1 << 31)]
    started: int = 0  # see `start_of`
    tls: str = ""  # folder with the owner's certificate, of a master that may be on another machine
    host: str = ""  # on which the process is; it may share the folder with others

    @classmethod
    def of_this_process(cls, address: str = "", token: str = "", tls: str = "") -> Self:
        return cls(address, token, os.getpid(), start_of(os.getpid()), tls, socket.gethostname())

    def is_alive(self) -> bool:
        """Whether the master's process is there, and not another process that has got its number since. One that is on another machine
        can't be seen from here: it counts as alive, so that nothing of its job is deleted."""
        if self.host not in ("", socket.gethostname()):
            return True
        return psutil.pid_exists(self.pid) and self.started in (0, start_of(self.pid))

    def write(self, path: Path) -> None:
        write_aside(path, json.dumps(asdict(self)), mode=0o600)  # it has the token

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if the file is not there, as no master runs, or none has started yet; or if it is damaged, or of another version."""
        try:
            return TypeAdapter(cls).validate_python(asdict(cls(**json.loads(path.read_text()))))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @property
    def credentials(self) -> Credentials:
        return TlsFolder(Path(self.tls)) if self.tls else Token(self.token)

    @property
    def endpoint(self) -> Endpoint:
        where = f" on {self.host}" if self.host else ""
        return Endpoint(self.address, self.credentials, f"the master at {self.address} (process {self.pid}{where})")


# How files with the state of a stopped training are named: the stem, the step, the suffix.
STOPPED_STEM, STOPPED_SUFFIX = "stopped", ".state"


def kept_states(folder: Path) -> list[Path]:
    """Files in the folder with the state that a training was stopped with."""
    return [*folder.glob(f"{STOPPED_STEM}-*{STOPPED_SUFFIX}"), *folder.glob(f"{STOPPED_STEM}.*of*-*{STOPPED_SUFFIX}")]


@dataclass(frozen=True, slots=True)
class JobDir:
    """Paths of one job's files; see the module's docstring."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    spec = PathBelow("job.json")
    starter = PathBelow("starter.json")
    master = PathBelow("master.json")
    journal = PathBelow("journal.jsonl")
    earlier = PathBelow("earlier.jsonl")
    status = PathBelow("status.json")
    state = PathBelow("state.json")
    # Which start of the batch job has the master that may write the state: see `elasticdl.master.shell.slurm_keeper.is_replaced`.
    holder = PathBelow("state.holder")
    batch = PathBelow("batch")
    tls = PathBelow("tls")
    logs = PathBelow("logs")
    master_log = PathBelow("logs/master.log")

    def worker_log(self, worker_id: int) -> Path:
        return self.logs / f"worker-{worker_id}.log"

    def worker_out(self, worker_id: int) -> Path:
        """What the worker prints on stdout, if that is kept apart from its log."""
        return self.logs / f"worker-{worker_id}.out"

    def write_status(self, status: Message) -> None:
        from google.protobuf import json_format  # large, and seldom needed

        write_aside(self.status, json_format.MessageToJson(status, preserving_proto_field_name=True))


def write_aside(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that a reader sees the old text or the new, never a part. A failure leaves nothing behind.

    ``mode``: the file's mode, less what the umask takes away.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    with contextlib.ExitStack() as undo:
        # "x", as in a folder of many users the path may be somebody else's link.
        with open(scratch, "x", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            undo.callback(scratch.unlink, missing_ok=True)
            file.write(text)
        scratch.replace(path)


def tail(path: Path, most: int) -> str:
    """The end of a file, of so many bytes; empty if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


HOME = "ELASTICDL_HOME"


def jobs_root() -> Path:
    """The folder of all local jobs; ``ELASTICDL_HOME`` replaces the user's state directory."""
    home = os.environ.get(HOME)
    return (Path(home) if home else platformdirs.user_state_path("elasticdl")) / "jobs"


def elsewhere(command: str) -> str:
    """A command that finds this process's jobs from another terminal as well."""
    home = os.environ.get(HOME)
    return f"{HOME}={shlex.quote(home)} {command}" if home else command


def create_job_dir(name: str) -> JobDir:
    """Make the directory of a new job.

    Raises:
        UserError: a job of this name is there already, or the folder can't be written.
    """
    job = JobDir(jobs_root() / name)
    try:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        job.path.mkdir(mode=0o700)
        job.logs.mkdir()
    except FileExistsError:
        raise UserError(f"there is a job named {name} already ({job.path}): choose another --job_name") from None
    except OSError as error:
        raise UserError(
            f"can't create the job's folder {job.path}: {error.strerror}; set ELASTICDL_HOME to a folder you can write"
        ) from None
    return job


def list_jobs() -> list[JobDir]:
    """All local jobs, the newest first."""
    root, found = jobs_root(), {}
    for path in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another command has just deleted it
            if path.is_dir() and not path.name.startswith("."):
                found[JobDir(path)] = path.stat().st_mtime
    return sorted(found, key=found.__getitem__, reverse=True)


def start_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks since the machine was; 0 if that can't be known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START])
    except (OSError, IndexError, ValueError):
        return 0
