"""Every command of README.md and docs/ is typed, as it stands there, in a folder that holds what a checkout holds."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from elasticdl.common.tether import tethered
from elasticdl.job.journal import read_journal
from tests.cluster.cluster import Cluster
from tests.documents.reading import DOCUMENTS, ROOT, Command, How, PythonBlock, read

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

DEADLINE = 240.0
READ = [read(path) for path in DOCUMENTS if path.name != "tutorial.md"]  # which test_tutorial.py types
TYPED = {How.RUN, How.MEANWHILE}
NOT_IN_A_CLONE = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


@dataclass(frozen=True, slots=True)
class Typed:
    """A command that runs in a terminal of its own, or has ended."""

    text: str
    process: subprocess.Popen[bytes]
    output: Path

    def printed(self) -> str:
        return self.output.read_text()[-4000:]

    def end(self, code: int = 0) -> str:
        """What it printed; it has to end with ``code``."""
        try:
            ended = self.process.wait(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"`{self.text}` did not end in {DEADLINE:.0f} s:\n{self.printed()}") from None
        assert ended == code, f"`{self.text}` ended with {ended}:\n{self.printed()}"
        return self.printed()


class Reader:
    """Somebody in a fresh checkout in which everything is set up, who types what the documents say."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.home = folder / "home"
        shutil.copytree(ROOT, self.checkout, symlinks=True, ignore=NOT_IN_A_CLONE)
        (self.checkout / ".venv").symlink_to(sys.prefix)
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KUBECONFIG")}
        self.environment = {
            **kept,
            "PATH": f"{self.checkout}/.venv/bin{os.pathsep}{os.environ['PATH']}",
            "ELASTICDL_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",  # the tests run two at a time
        }
        self._typed: list[Typed] = []

    def type(self, text: str) -> str:
        """What the command printed; it has to end well."""
        return self.start(text).end()

    def start(self, text: str) -> Typed:
        output = self.checkout.parent / f"{len(self._typed)}.out"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                tethered(["bash", "-c", text]),
                cwd=self.checkout,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self._typed.append(Typed(text, process, output))
        return self._typed[-1]

    def leave(self) -> None:
        """Whatever still runs is killed; a job of this machine ends with its command."""
        for typed in self._typed:
            typed.process.kill()
            typed.process.wait(timeout=DEADLINE)

    def wait_for_a_world(self, job: Typed, before: int) -> None:
        """One more than there were ``before``, of jobs that ran earlier."""
        deadline = time.monotonic() + DEADLINE
        while self.worlds() <= before:
            assert job.process.poll() is None, f"`{job.text}` has ended:\n{job.printed()}"
            assert time.monotonic() < deadline, f"no world in {DEADLINE:.0f} s:\n{job.printed()}"
            time.sleep(0.1)

    def worlds(self) -> int:
        journals = (self.home / "jobs").glob("*/journal.jsonl")
        return sum(entry["event"] == "world_formed" for path in journals for entry in read_journal(path))

    def write(self, block: PythonBlock) -> None:
        """A block that is a file: the one that the checkout has, but for its docstring, or a new one."""
        path = self.checkout / block.file
        if path.exists():
            assert path.read_text().partition("\n\n")[2] == block.code, f"{block.place} differs from {block.file}"
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code)


@pytest.fixture
def reader(tmp_path):
    made = Reader(tmp_path)
    yield made
    made.leave()


def check(command: Command, printed: str) -> None:
    if command.words[:2] in (["elasticdl", "train"], ["elasticdl", "run"]):
        steps = re.search(r"^job \S+ succeeded: (\d+) steps", printed, re.MULTILINE)
        assert steps, f"{command.place}:\n{printed}"
        assert int(steps[1]) > 0, f"{command.place}:\n{printed}"


def type_with_others(reader: Reader, command: Command, others: list[Command]) -> None:
    """Type ``others`` in another terminal while the command runs."""
    before = reader.worlds()
    job = reader.start(command.text)
    reader.wait_for_a_world(job, before)
    followers = []
    for other in others:
        typed = reader.start(other.text)
        if "--follow" in other.words:
            followers.append(typed)
        else:
            typed.end()
    stopped = any(other.words[:2] == ["elasticdl", "stop"] for other in others)
    job.end(code=1 if stopped else 0)
    for follower in followers:
        follower.end()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document",
    [each for each in READ if any(command.how in TYPED for command in each.commands)],
    ids=lambda each: each.name,
)
def test_the_commands_of(document, reader):
    steps = [
        each
        for each in document.steps
        if isinstance(each, PythonBlock) or (isinstance(each, Command) and each.how in TYPED)
    ]
    while steps:
        step = steps.pop(0)
        if isinstance(step, PythonBlock):
            reader.write(step) if step.file else None
            continue
        others = []
        while steps and isinstance(steps[0], Command) and steps[0].how is How.MEANWHILE:
            others.append(steps.pop(0))
        if others:
            type_with_others(reader, step, others)
        else:
            check(step, reader.type(step.text))


@pytest.mark.timeout(900)
def test_the_commands_on_the_tests_own_cluster(own_cluster, namespace, reader, tmp_path):
    kubeconfig = with_namespace(own_cluster.kubeconfig, namespace, tmp_path / "kubeconfig")
    reader.environment["KUBECONFIG"] = str(kubeconfig)
    claim_volume(own_cluster, namespace, "data")  # "needs a volume claim `data`"
    commands = [command for document in READ for command in document.commands]
    for command in commands:
        if command.how is How.ON_CLUSTER:
            check(command, reader.type(command.text))
        elif command.how is How.MARKED and "--image" in command.words and command.words[1] in ("train", "run"):
            reader.type(f"{command.text} --dry_run")


def claim_volume(cluster: Cluster, namespace: str, name: str) -> None:
    room = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"metadata": {"name": name}, "spec": room}
    client.CoreV1Api(cluster.client()).create_namespaced_persistent_volume_claim(namespace, claim)


def with_namespace(kubeconfig: Path, namespace: str, path: Path) -> Path:
    """As after `kubectl config set-context --current --namespace`."""
    content = yaml.safe_load(kubeconfig.read_text())
    for context in content["contexts"]:
        context["context"]["namespace"] = namespace
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_command_that_does_not_exist_would_be_noticed(reader):
    with pytest.raises(AssertionError, match="ended with 2"):
        reader.type(shlex.join(["elasticdl", "zoo", "init", "nowhere"]))
