"""Sessions with the command line, as tests write them down: what there is, what is typed, what is shown.

    + runs live            what the test sets up: methods of `Scene` with their arguments, and + between them
    $ scale live 3         a command of elasticdl
    > from 3 to 3 workers  what it shows on stdout, `!` what on stderr; `...` is anything, alone in a line any number of lines
    ? 0                    its exit code, if that is not 2 after an error of the command line, and else 0
    = scale 3-3            what the masters, and the programs that the test put in place of others, were asked meanwhile

What is short stands behind the command: `$ scale 2-4  > from 2 to 4 workers  = scale 2-4`, `$ stop a  ! job a is not running  ? 2`;
there ! is what follows `elasticdl stop: `, and !! a whole line.

A stream of which nothing is written down has to be empty. HOME is the folder of the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import grpc
import pytest
from google.protobuf import json_format

from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import Submission
from elasticdl.cli.signals import FINGER_SECONDS
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir, jobs_root, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import Client
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as rpc

TOKEN = "secret"
DEADLINE = 30.0
NOWHERE = "127.0.0.1:1"


def new_job(name: str) -> JobDir:
    job = create_job_dir(name)
    write_aside(job.spec, JobSpec(job_name=name).to_json())
    return job


def ended_job(name: str, **fields: object) -> JobDir:
    job = new_job(name)
    status = pb.JobStatus(job_name=name, **{"phase": "succeeded", "step": 7, "total_steps": 7, **fields})
    write_aside(job.status, json_format.MessageToJson(status))
    return job


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-ISc", ""])
    process.wait()
    return process.pid


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


# ---- a master that only pretends ----


class CalledMaster(rpc.MasterServicer):
    """It serves the calls of the command line: sends out what is given to `update`, and keeps in words what it was asked for."""

    def __init__(self, job_name: str) -> None:
        self.told: list[str] = []  # to do what
        self.once_watched: list[Callable[[], object]] = []
        self.at_stop: Callable[[], object] = lambda: None
        self._status = pb.JobStatus(job_name=job_name, phase="pending", time_left=-1, min_workers=1, max_workers=2)
        self._statuses = [pb.JobStatus.FromString(self._status.SerializeToString())]
        self._ended = False
        self._watched = threading.Event()
        self._changed = threading.Condition()

    def update(self, **fields: object) -> None:
        with self._changed:
            self._status.MergeFrom(pb.JobStatus(**fields))
            self._statuses.append(pb.JobStatus.FromString(self._status.SerializeToString()))
            self._changed.notify_all()

    def end(self) -> pb.JobStatus:
        """End the streams; returns the last status."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._statuses[-1]

    def wait_for_watcher(self) -> None:
        assert self._watched.wait(DEADLINE)

    def Status(self, request, context):
        self._authenticate(context)
        return self._statuses[-1]

    def Watch(self, request, context):
        self._authenticate(context)
        self._watched.set()
        self._is_watched()
        sent, over = 0, False
        while not over:
            with self._changed:
                assert self._changed.wait_for(lambda seen=sent: len(self._statuses) > seen or self._ended, DEADLINE)
                fresh, over = self._statuses[sent:], self._ended
            yield from fresh
            sent += len(fresh)

    def Events(self, request, context):
        """What the job's folder has."""
        self._authenticate(context)
        self._is_watched()
        journal, told, is_last = JobDir(jobs_root() / self._status.job_name).journal, 0, False
        while not is_last and context.is_active():
            is_last = self._ended or not request.follow
            lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            yield from (pb.JournalEntry(json=line.removesuffix("\n")) for line in whole[told:])
            told = len(whole)
            time.sleep(0.02)

    def Scale(self, request, context):
        self._record(context, f"scale {request.min_workers}-{request.max_workers}")
        if request.max_workers > 8:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this machine has 8 slots")
        return pb.ScaleReply(message=f"from {request.min_workers} to {request.max_workers} workers")

    def Stop(self, request, context):
        words = {"checkpoint": request.checkpoint, "now": request.now}
        self._record(context, " ".join(["stop", *(word for word, given in words.items() if given)]))
        self.at_stop()
        return pb.StopReply()

    def _is_watched(self):
        while self.once_watched:
            self.once_watched.pop(0)()

    def _record(self, context, words):
        self._authenticate(context)
        self.told.append(words)

    def _authenticate(self, context):
        if ("elasticdl-token", TOKEN) not in [tuple(item) for item in context.invocation_metadata()]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


@contextmanager
def serving(master: CalledMaster):
    """Serve it; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rpc.add_MasterServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield MasterAddress(f"127.0.0.1:{port}", TOKEN, os.getpid())
    finally:
        master.end()
        server.stop(grace=1).wait(DEADLINE)


def play_part(master: CalledMaster, journal: TextIO, part: str, stopped: threading.Event) -> None:
    """One job from its start to its end."""

    numbers = itertools.count(1)

    def tell(event: str, **fields: object) -> None:
        print(json.dumps({"number": next(numbers), "time": 0.0, "event": event, **fields}), file=journal, flush=True)

    master.update(phase="running", step=0, total_steps=20, total_epochs=2)
    tell("world_formed", world=1, members=[0, 1], step=0, reason="2 workers are ready")
    if part == "fails":
        master.update(phase="failed", reason="worker 1: ValueError: bad sample", traceback="Traceback\nValueError: bad")
        return
    for step in range(1, 21):
        master.update(step=step, epoch=(step - 1) // 10, loss=1 / step, samples=32 * step, samples_per_second=1000.0)
    tell("evaluation", step=20, epoch=1, samples=64, metrics={"accuracy": 0.5})
    if part == "forever" or part.startswith("SIG"):
        if part != "forever":
            os.kill(os.getpid(), signal.Signals[part])
        if not stopped.wait(DEADLINE):
            raise TimeoutError("nobody stopped this job")
        master.update(phase="stopped", reason="interrupted")
        return
    master.update(phase="succeeded", metrics={"accuracy": 0.5})


class PlayedMaster:
    """In a command, in place of `elasticdl.master.shell.serve.Master` on this machine; ``--model_def`` says which part it plays."""

    def __init__(self, spec: JobSpec, job: JobDir, make_launcher: object) -> None:
        self._part = spec.model_def
        self._job = job
        self._stopped = threading.Event()
        self.is_up = asyncio.Event()
        if self._part == "refuses":
            raise UserError("--port 80: the port is taken; choose another")

    def post(self, event: object) -> None:
        """That it is to stop."""
        if self._part != "stubborn":
            self._stopped.set()

    async def run(self) -> None:
        if self._part == "slow":
            self._job.journal.touch()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(DEADLINE)
        master = CalledMaster(self._job.name)
        master.at_stop = self._stopped.set
        with serving(master) as address:
            address.write(self._job.master)
            self.is_up.set()
            if self._part == "vanishes":
                raise RuntimeError("last words")
            if self._part == "stubborn":
                await asyncio.to_thread(master.wait_for_watcher)
                while True:  # as a person does who is not heard
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(2 * FINGER_SECONDS)
            await asyncio.to_thread(self._play, master)
            last = master.end()
        write_aside(self._job.status, json_format.MessageToJson(last))
        self._job.master.unlink()

    def _play(self, master: CalledMaster) -> None:
        master.wait_for_watcher()
        self._job.worker_out(0).write_text("printed by worker 0\n")
        with self._job.journal.open("a") as journal:
            play_part(master, journal, self._part, self._stopped)


# ---- a scene, and sessions in it ----


def named(text: str) -> tuple[str, dict[str, object]]:
    """A name, and fields of a status: JSON, or a word."""
    name, *fields = shlex.split(text)
    pairs = (each.partition("=")[::2] for each in fields)
    return name, {key: json.loads(value) if re.match(r"[\d{[-]", value) else value for key, value in pairs}


@dataclass
class Scene:
    """What there is, in the folder ``home``."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    masters: dict[str, CalledMaster] = field(default_factory=dict)
    served: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        (self.home / "bin").mkdir()
        for name, value in {"ELASTICDL_HOME": self.home, "PATH": self.home / "bin", "COLUMNS": 200}.items():
            self.monkeypatch.setenv(name, str(value))
        self.monkeypatch.setenv("KUBECONFIG", str(self.home / "config"))
        self.monkeypatch.chdir(self.home)

    def set_up_all(self, steps: str, between: str) -> None:
        for step in steps.split(f"{between} "):
            name, _, text = step.strip().partition(" ")
            getattr(self, name)(text)

    # ---- jobs of this machine ----

    def new(self, text: str) -> None:
        new_job(text)

    def ended(self, text: str) -> None:
        name, fields = named(text)
        ended_job(name, **fields)

    def lost(self, text: str) -> None:
        self._master(text, MasterAddress(NOWHERE, TOKEN, dead_pid()))

    def elsewhere(self, text: str) -> None:
        """Of another machine that shares the folder."""
        self._master(text, MasterAddress(NOWHERE, TOKEN, dead_pid(), host="another"))

    def deaf(self, text: str) -> None:
        self._master(text, MasterAddress(NOWHERE, TOKEN, os.getpid()))

    def runs(self, text: str) -> None:
        """A job whose master is in this process."""
        name, fields = named(text)
        self.masters[name] = CalledMaster(name)
        self.masters[name].update(**{"phase": "running", "step": 3, "total_steps": 10, **fields})
        self._master(name, self.served.enter_context(serving(self.masters[name])))

    def _master(self, name: str, address: MasterAddress) -> None:
        job = JobDir(jobs_root() / name)
        address.write(job.master if job.path.exists() else new_job(name).master)

    def obeys(self, text: str) -> None:
        """What the master does once it is told to stop: steps of a session, with ; between them."""
        name, _, steps = text.partition(" ")
        self.masters[name].at_stop = lambda: self.set_up_all(steps, ";")

    def watched(self, text: str) -> None:
        """What happens once somebody watches the job."""
        name, _, steps = text.partition(" ")
        self.masters[name].once_watched.append(lambda: self.set_up_all(steps, ";"))

    def says(self, text: str) -> None:
        name, fields = named(text)
        self.masters[name].update(**fields)

    def ends(self, text: str) -> None:
        self.masters[text].end()

    def interrupted(self, text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # ---- files and programs ----

    def file(self, text: str) -> None:
        r"""With this text, in which \n and the like are as in Python; made or written on."""
        path, _, content = text.partition(" ")
        with (self.home / path).open("ab") as file:
            file.write(content.encode().decode("unicode_escape").encode("latin-1"))

    def holds(self, text: str) -> None:
        """That a file reads so."""
        path, _, content = text.partition(" ")
        found = (self.home / path).read_text().replace(str(self.home), "HOME")
        pattern = ".*".join(map(re.escape, content.replace(r"\n", "\n").split("...")))
        assert re.fullmatch(pattern, found, re.DOTALL), found

    def lacks(self, text: str) -> None:
        assert not (self.home / text).exists()

    def stopped(self, text: str) -> None:
        """That the job had not succeeded, but was stopped, and has kept what it had trained."""
        (jobs_root() / text / "status.json").write_text('{"phase": "stopped"}')
        (jobs_root() / text / "stopped-0000000040.state").touch()

    def check(self, text: str) -> None:
        """What the pretended check of a worker does."""
        (self.home / "pretend_check.py").write_text(text)

    def env(self, text: str) -> None:
        self.monkeypatch.setenv(*text.partition("=")[::2])

    def folder(self, text: str) -> None:
        (self.home / text).mkdir(parents=True)

    def gone(self, text: str) -> None:
        path = self.home / text
        path.unlink() if path.is_file() else path.rmdir()

    def aged(self, text: str) -> None:
        """That the folder of the job has not been touched for so many seconds from 1970 on."""
        name, _, second = text.partition(" ")
        os.utime(jobs_root() / name, (float(second), float(second)))

    def program(self, text: str) -> None:
        """It notes how it was called, and does what the text says, as a shell script."""
        name, _, script = text.partition(" ")
        path = self.home / "bin" / name
        does = script.replace("HOME", str(self.home))
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.home}/called\n{does}\n')
        path.chmod(0o755)

    def batch(self, text: str) -> None:
        """A job of Slurm's, whose master is its job 7."""
        new_job(text).batch.write_text("7")

    # ---- a cluster ----

    def kubeconfig(self, text: str) -> None:
        """As it is given, or of a cluster that does not answer."""
        users, server = "users: [{name: u, user: {}}]", 'server: "https://127.0.0.1:9"'
        context = "contexts: [{name: a, context: {cluster: c, user: u}}]\ncurrent-context: a"
        usual = f"{context}\nclusters: [{{name: c, cluster: {{{server}}}}}]\n{users}\n"
        (self.home / "config").write_text(text or usual)

    def cluster(self, text: str) -> None:
        """The jobs of this name on a cluster, which have no pods."""
        name, _, found = text.partition(" ")
        job = {"metadata": {"creationTimestamp": "1", "labels": {"elasticdl.org/job": name}}}
        self.monkeypatch.setattr(Client, "list", lambda _, kind, **__: [job] if kind == "Job" else [])
        self.monkeypatch.setattr(Client, "find", lambda _, kind, __: job if found and kind == "Job" else None)

    def submits(self, text: str) -> None:
        """A cluster takes whatever it is given."""
        self.monkeypatch.setattr(Submission, "check", lambda submission: None)
        self.monkeypatch.setattr(Submission, "make", lambda submission, pause: None)

    def unreachable(self, text: str) -> None:
        """Who asks a cluster nevertheless is told of it by an error of this test."""
        self.monkeypatch.setattr(Client, "find", lambda *_, **__: pytest.fail("the cluster was asked"))

    def asked(self) -> list[str]:
        """Since this was last called."""
        called = self.home / "called"
        calls = called.read_text().splitlines() if called.exists() else []
        called.unlink(missing_ok=True)
        told = [master.told.pop(0) for master in self.masters.values() for _ in list(master.told)]
        return [*(call for call in calls if not call.startswith("squeue")), *told]


@contextmanager
def scene_in(home: Path, monkeypatch: pytest.MonkeyPatch):
    scene = Scene(home, monkeypatch)
    with scene.served:
        yield scene


def sessions(text: str) -> list:
    """One for each title, which begins with #; as parameters of a test."""
    parts = re.split(r"^# (.*)\n", text, flags=re.MULTILINE)[1:]
    return [pytest.param(body.strip(), id=title) for title, body in zip(parts[::2], parts[1::2], strict=True)]


def matches(shown: str, wanted: list[str]) -> bool:
    lines = [r"(.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n" for line in wanted]
    return re.fullmatch("".join(lines), shown) is not None


def play(session: str, scene: Scene, capsys) -> None:
    """Raises AssertionError where something else is shown than what is written down."""
    for step in re.split(r"\n(?=[+$])", session):
        first, *rest = step.splitlines()
        if first.startswith("+"):
            scene.set_up_all(first[2:], "+")
            continue
        typed, *short = re.split(r"  (?=(?:[>?=]|!!?) )", first[2:])
        who = f"! elasticdl {typed.split()[0]}: "
        lines = [who + part[2:] if part.startswith("! ") else part.removeprefix("!") for part in short] + rest
        assert {line[0] for line in lines} <= set(">!?="), f"{step}: a line without its sign"
        code, *shown = run(capsys, *shlex.split(typed))
        out, err, asked, wanted = ([line[2:] for line in lines if line[0] == sign] for sign in ">!=?")
        where = [re.sub(r" +\n", "\n", text.replace(str(scene.home), "HOME")) for text in shown]
        usual = 2 if err and err[-1].startswith("elasticdl ") else 0
        assert code == (int(wanted[0]) if wanted else usual), f"{typed}\n{where[0]}{where[1]}"
        for text, expected in zip(where, (out, err), strict=True):
            assert matches(text, expected), f"{typed}: shown is\n{text}and not {expected}"
        assert [call.replace(str(scene.home), "HOME") for call in scene.asked()] == asked, typed
