"""Every command of README.md and docs/ is typed, as it stands there, in a folder that holds what a checkout holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cluster_kit import wait_for
from kubernetes import client

from elasticdl.common.process_group import tethered
from elasticdl.job.journal import read_journal
from tests.documents.reading import DOCUMENTS, ROOT, Command, How, PythonBlock, read

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE = 240.0
READ = [read(path) for path in DOCUMENTS if path.name != "tutorial.md"]  # which test_tutorial.py types
NOT_IN_A_CLONE = shutil.ignore_patterns(
    ".git", ".venv", ".coverage*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


@dataclass(frozen=True, slots=True)
class Typed:
    """A command that runs in a terminal of its own, or has ended."""

    text: str
    process: subprocess.Popen[bytes]
    output: Path

    def end(self, code: int = 0) -> str:
        """What it printed; it has to end with ``code``."""
        ended = self.process.wait(timeout=DEADLINE)
        printed = self.output.read_text()[-4000:]
        assert ended == code, f"`{self.text}` ended with {ended}:\n{printed}"
        return printed


class Typist:
    """Somebody in a fresh checkout in which everything is set up, who types what the documents say."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.home = folder / "home"
        shutil.copytree(ROOT, self.checkout, symlinks=True, ignore=NOT_IN_A_CLONE)
        (self.checkout / ".venv").symlink_to(sys.prefix)
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KUBECONFIG")}
        path = f"{self.checkout}/.venv/bin{os.pathsep}{os.environ['PATH']}"
        # One thread each: the tests run two at a time.
        self.environment = {**kept, "PATH": path, "ELASTICDL_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.typed: list[Typed] = []

    def start(self, text: str) -> Typed:
        output = self.checkout.parent / f"{len(self.typed)}.out"
        with output.open("wb") as sink:
            streams = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
            command = tethered(["bash", "-c", text])
            process = subprocess.Popen(command, cwd=self.checkout, env=self.environment, **streams)
        self.typed.append(Typed(text, process, output))
        return self.typed[-1]

    def type(self, command: Command) -> None:
        """It has to end well, and a training to have made steps."""
        printed = self.start(command.text).end()
        if command.words[:2] in (["elasticdl", "train"], ["elasticdl", "run"]):
            steps = re.search(r"^job \S+ succeeded: (\d+) steps", printed, re.MULTILINE)
            assert steps, f"{command.place}:\n{printed}"
            assert int(steps[1]) > 0, f"{command.place}:\n{printed}"

    def type_with_others(self, command: Command, others: list[Command]) -> None:
        """Type ``others`` in another terminal while the command runs."""
        before = self.worlds()
        job = self.start(command.text)
        wait_for("world", lambda: self.worlds() > before, job.output.read_text)
        followers = []
        for other in others:
            typed = self.start(other.text)
            if "--follow" in other.words:
                followers.append(typed)
            else:
                typed.end()
        stopped = any(other.words[:2] == ["elasticdl", "stop"] for other in others)
        job.end(code=1 if stopped else 0)
        for follower in followers:
            follower.end()

    def worlds(self) -> int:
        journals = (self.home / "jobs").glob("*/journal.jsonl")
        return sum(entry["event"] == "world_formed" for path in journals for entry in read_journal(path))

    def write(self, block: PythonBlock) -> None:
        """A block that is a file: the one that the checkout has, but for its docstring, or a new one."""
        path = self.checkout / block.file
        if path.exists():
            assert path.read_text().partition("\n\n")[2] == block.code, f"{block.place} differs from {block.file}"
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)


@pytest.fixture
def reader(tmp_path):
    made = Typist(tmp_path)
    yield made
    for typed in made.typed:  # a job of this machine ends with its command
        typed.process.kill()
        typed.process.wait(timeout=DEADLINE)


def typed_steps(document):
    typed = (How.RUN, How.MEANWHILE)
    files = [each for each in document.steps if isinstance(each, PythonBlock) and each.file]
    return [each for each in document.steps if each in files or (isinstance(each, Command) and each.how in typed)]


@pytest.mark.parametrize(
    "document",
    [each for each in READ if any(isinstance(step, Command) for step in typed_steps(each))],
    ids=lambda each: each.name,
)
def test_the_commands_of(document, reader):
    steps = typed_steps(document)
    while steps:
        step = steps.pop(0)
        if isinstance(step, PythonBlock):
            reader.write(step)
            continue
        others = []
        while steps and isinstance(steps[0], Command) and steps[0].how is How.MEANWHILE:
            others.append(steps.pop(0))
        reader.type_with_others(step, others) if others else reader.type(step)


def test_the_commands_on_the_tests_own_cluster(own_cluster, namespace, reader, tmp_path):
    content = yaml.safe_load(own_cluster.kubeconfig.read_text())
    for context in content["contexts"]:  # as after `kubectl config set-context --current --namespace`
        context["context"]["namespace"] = namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    reader.environment["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    room = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"metadata": {"name": "data"}, "spec": room}  # "needs a volume claim `data`"
    client.CoreV1Api(own_cluster.client()).create_namespaced_persistent_volume_claim(namespace, claim)
    for command in (command for document in READ for command in document.commands):
        if command.how is How.ON_CLUSTER:
            reader.type(command)
        elif command.how is How.MARKED and "--image" in command.words and command.words[1] in ("train", "run"):
            reader.start(f"{command.text} --dry_run").end()
