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

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from concurrent import futures
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from google.protobuf import json_format

from elasticdl.cli.__main__ import main
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir, jobs_root, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import Client
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as rpc

TOKEN = "secret"
DEADLINE = 30.0
NOWHERE = "127.0.0.1:1"


def new_job(name):
    job = create_job_dir(name)
    write_aside(job.spec, JobSpec(job_name=name).to_json())
    return job


def ended_job(name, **fields):
    job = new_job(name)
    status = pb.JobStatus(job_name=name, **{"phase": "succeeded", "step": 7, "total_steps": 7, **fields})
    write_aside(job.status, json_format.MessageToJson(status))
    return job


def run(capsys, *argv):
    """Its exit code, and what it shows on either stream."""
    return main(argv), *capsys.readouterr()


def signal_command(number):
    """The command in this process, whose signals are the main thread's: another thread would note one when that runs, at the earliest."""
    signal.pthread_kill(threading.main_thread().ident, number)


# ---- a master that only pretends ----


class CalledMaster(rpc.MasterServicer):
    """It serves the calls of the command line: sends out what is given to `update`, and keeps in words what it was asked for."""

    def __init__(self, job_name):
        self.told = []  # to do what
        self.once_watched, self.at_stop = [], lambda: None  # functions
        self.watched, self.over = threading.Event(), threading.Event()
        self.statuses = [pb.JobStatus(job_name=job_name, phase="pending", time_left=-1, min_workers=1, max_workers=2)]

    def update(self, **fields):
        self.statuses.append(pb.JobStatus.FromString(self.statuses[-1].SerializeToString()))
        self.statuses[-1].MergeFrom(pb.JobStatus(**fields))

    def Status(self, request, context):
        self._authenticate(context)
        return self.statuses[-1]

    def Watch(self, request, context):
        yield from self._stream(context, lambda: self.statuses)

    def Events(self, request, context):
        """What the job's folder has."""

        def entries():
            lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
            return [pb.JournalEntry(json=line.removesuffix("\n")) for line in lines if line.endswith("\n")]

        journal = JobDir(jobs_root() / self.statuses[0].job_name).journal
        yield from self._stream(context, entries, request.follow)

    def Scale(self, request, context):
        self._authenticate(context)
        self.told.append(f"scale {request.min_workers}-{request.max_workers}")
        if request.max_workers > 8:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this machine has 8 slots")
        return pb.ScaleReply(message=f"from {request.min_workers} to {request.max_workers} workers")

    def Stop(self, request, context):
        self._authenticate(context)
        self.told.append(f"stop{' checkpoint' * request.checkpoint}{' now' * request.now}")
        self.at_stop()
        return pb.StopReply()

    def _stream(self, context, found, follow=True):
        """Until the master ends."""
        self._authenticate(context)
        self.watched.set()
        while self.once_watched:
            self.once_watched.pop(0)()
        told, over = 0, False
        while not over and context.is_active():
            over = self.over.is_set() or not follow
            fresh = found()[told:]
            yield from fresh
            told += len(fresh)
            time.sleep(0.01)

    def _authenticate(self, context):
        if ("elasticdl-token", TOKEN) not in [tuple(item) for item in context.invocation_metadata()]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


@contextmanager
def serving(master):
    """Serve it; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rpc.add_MasterServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield MasterAddress(f"127.0.0.1:{port}", TOKEN, os.getpid())
    finally:
        master.over.set()
        server.stop(grace=1).wait(DEADLINE)


# ---- a scene, and sessions in it ----


def named(text):
    """A name, and fields of a status: JSON, or a word."""
    name, *fields = shlex.split(text)
    pairs = (each.partition("=")[::2] for each in fields)
    return name, {key: json.loads(value) if re.match(r"[\d{[-]", value) else value for key, value in pairs}


class Scene:
    """What there is, in the folder ``home``."""

    def __init__(self, home, monkeypatch):
        self.home, self.monkeypatch, self.masters, self.served = home, monkeypatch, {}, ExitStack()
        (home / "bin").mkdir()
        given = {"ELASTICDL_HOME": home, "PATH": home / "bin", "COLUMNS": 200, "KUBECONFIG": home / "config"}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(home)

    def set_up_all(self, steps, between):
        for step in steps.split(f"{between} "):
            name, _, text = step.strip().partition(" ")
            getattr(self, name)(text)

    # ---- jobs of this machine ----

    def new(self, text):
        new_job(text)

    def ended(self, text):
        name, fields = named(text)
        ended_job(name, **fields)

    def lost(self, text):
        with subprocess.Popen("/bin/true") as process:
            pass
        self._master(text, MasterAddress(NOWHERE, TOKEN, process.pid))

    def deaf(self, text):
        self._master(text, MasterAddress(NOWHERE, TOKEN, os.getpid()))

    def runs(self, text):
        """A job whose master is in this process."""
        name, fields = named(text)
        self.masters[name] = CalledMaster(name)
        self.masters[name].update(**{"phase": "running", "step": 3, "total_steps": 10, **fields})
        self._master(name, self.served.enter_context(serving(self.masters[name])))

    def _master(self, name, address):
        job = JobDir(jobs_root() / name)
        address.write(job.master if job.path.exists() else new_job(name).master)

    def obeys(self, text):
        """What the master does once it is told to stop: steps of a session, with ; between them."""
        name, _, steps = text.partition(" ")
        self.masters[name].at_stop = lambda: self.set_up_all(steps, ";")

    def watched(self, text):
        """What happens once somebody watches the job."""
        name, _, steps = text.partition(" ")
        self.masters[name].once_watched.append(lambda: self.set_up_all(steps, ";"))

    def says(self, text):
        name, fields = named(text)
        self.masters[name].update(**fields)

    def ends(self, text):
        self.masters[text].over.set()

    def interrupted(self, text):
        signal_command(signal.SIGINT)

    def stopped(self, text):
        """That the job had not succeeded, but was stopped, and has kept what it had trained."""
        (jobs_root() / text / "status.json").write_text('{"phase": "stopped"}')
        (jobs_root() / text / "stopped-0000000040.state").touch()

    def aged(self, text):
        """That the folder of the job has not been touched for so many seconds from 1970 on."""
        name, _, second = text.partition(" ")
        os.utime(jobs_root() / name, (float(second), float(second)))

    # ---- files and programs ----

    def file(self, text):
        r"""With this text, in which \n and the like are as in Python; made or written on."""
        path, _, content = text.partition(" ")
        with (self.home / path).open("ab") as file:
            file.write(content.encode().decode("unicode_escape").encode("latin-1"))

    def holds(self, text):
        """That a file reads so."""
        path, _, content = text.partition(" ")
        found = (self.home / path).read_text().replace(str(self.home), "HOME")
        pattern = ".*".join(map(re.escape, content.replace(r"\n", "\n").split("...")))
        assert re.fullmatch(pattern, found, re.DOTALL), found

    def lacks(self, text):
        assert not (self.home / text).exists()

    def check(self, text):
        """What the pretended check of a worker does."""
        (self.home / "pretend_check.py").write_text(text)

    def env(self, text):
        self.monkeypatch.setenv(*text.partition("=")[::2])

    def folder(self, text):
        (self.home / text).mkdir(parents=True)

    def gone(self, text):
        path = self.home / text
        path.unlink() if path.is_file() else path.rmdir()

    def program(self, text):
        """It notes how it was called, and does what the text says, as a shell script."""
        name, _, script = text.partition(" ")
        path = self.home / "bin" / name
        does = script.replace("HOME", str(self.home))
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.home}/called\n{does}\n')
        path.chmod(0o755)

    def batch(self, text):
        """A job of Slurm's, whose master is its job 7."""
        new_job(text).batch.write_text("7")

    # ---- a cluster ----

    def kubeconfig(self, text):
        """As it is given, or of a cluster that does not answer."""
        usual = "{current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}], "
        usual += "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:9'}}], users: [{name: u, user: {}}]}"
        (self.home / "config").write_text(text or usual)

    def cluster(self, text):
        """The jobs of this name on a cluster, which have no pods."""
        name, _, found = text.partition(" ")
        job = {"metadata": {"creationTimestamp": "1", "labels": {"elasticdl.org/job": name}}}
        self.monkeypatch.setattr(Client, "list", lambda _, kind, **__: [job] if kind == "Job" else [])
        self.monkeypatch.setattr(Client, "find", lambda _, kind, __: job if found and kind == "Job" else None)

    def asked(self):
        """Since this was last called."""
        called = self.home / "called"
        calls = called.read_text().splitlines() if called.exists() else []
        called.unlink(missing_ok=True)
        told = [master.told.pop(0) for master in self.masters.values() for _ in list(master.told)]
        return [*(call for call in calls if not call.startswith("squeue")), *told]


@contextmanager
def scene_in(home, monkeypatch):
    scene = Scene(home, monkeypatch)
    with scene.served:
        yield scene


def sessions(text):
    """One for each title, which begins with #; as parameters of a test."""
    parts = re.split(r"^# (.*)\n", text, flags=re.MULTILINE)[1:]
    return [pytest.param(body.strip(), id=title) for title, body in zip(parts[::2], parts[1::2], strict=True)]


def matches(shown, wanted):
    lines = [r"(.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n" for line in wanted]
    return re.fullmatch("".join(lines), shown) is not None


def play(session, scene, capsys):
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
