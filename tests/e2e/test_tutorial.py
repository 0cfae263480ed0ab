"""docs/tutorial.md as its reader types it: in two terminals, each command when the screen shows what the page shows before it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticdl.common.process_group import tethered
from tests.documents.reading import ROOT, Command, How, PythonBlock, Shown, changed, read

pytestmark = pytest.mark.slow

DEADLINE = 120.0
AGAIN = 10.0  # a command that looks at the job takes less
PID = re.compile(r"pid (\d+)")
NUMBERS = re.compile(r"(?<!worker )\d[\d.,: -]*")


class Terminal:
    """A shell that reads what is typed when the command before has ended."""

    def __init__(self, folder: Path, screen: Path, environment: dict[str, str]) -> None:
        self._screen = screen
        self._seen = 0  # lines
        with screen.open("wb") as sink:
            streams = {"stdin": subprocess.PIPE, "stdout": sink, "stderr": subprocess.STDOUT}
            how = {**streams, "start_new_session": True, "text": True, "bufsize": 1}
            self._shell = subprocess.Popen(tethered(["bash"]), cwd=folder, env=environment, **how)

    def screen(self) -> str:
        return self._screen.read_text()

    def type(self, text: str) -> None:
        self._shell.stdin.write(f"{text}\n")

    def wait_for(self, line: str, again: str = "") -> str:
        """The first line, of those after what was waited for last, that begins as this one; but for a worker's, numbers may differ.

        ``again``: what is typed again and again meanwhile.
        """
        deadline = time.monotonic() + DEADLINE
        due = time.monotonic() + AGAIN
        while True:
            for number, shown in list(enumerate(self.screen().splitlines()))[self._seen :]:
                if without_numbers(shown).startswith(without_numbers(line)):
                    self._seen = number
                    return shown
            assert time.monotonic() < deadline, f"`{line}` is not on the screen:\n{self.screen()}"
            if again and time.monotonic() > due:
                self.type(again)
                due = time.monotonic() + AGAIN
            time.sleep(0.05)

    def close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait(timeout=DEADLINE)


def without_numbers(line: str) -> str:
    """Of `worker 3` the number stays: workers start in no certain order."""
    return " ".join(NUMBERS.sub("# ", line).split())


class Learner:
    """Somebody who has installed the packages, and reads the page from its top."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "you"
        activate = self.folder / "digits" / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{sys.prefix}/bin:$PATH"\n')
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ELASTICDL_HOME")}
        environment = {**kept, "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        self.first, self.second = (Terminal(self.folder, folder / name, environment) for name in ("first", "second"))
        self.first.type("source digits/.venv/bin/activate")
        self._at = self.first
        self._file = Path()
        self._typed = ""
        self._own: dict[str, str] = {}  # numbers of the page, and those of this reader's screen

    def follow(self, step: Command | PythonBlock | Shown) -> None:
        if isinstance(step, PythonBlock):
            self._file = self.folder / step.file
            self._file.write_text(step.code)
        elif isinstance(step, Command):
            self._type(step)
        elif step.language == "diff":
            self._file.write_text(changed(self._file.read_text(), step.text))
        else:
            self._look(step)

    def _type(self, command: Command) -> None:
        text = command.text
        if command.how is How.MARKED:
            if "yours" not in command.mark:
                return  # packages are there
            text = re.sub(r"\d{2,}", lambda number: self._own[number[0]], text)
        self._at = self.first if command.how is How.RUN else self.second
        self._at.type(text)
        self._typed = text

    def _look(self, shown: Shown) -> None:
        if "first terminal" in shown.before.splitlines()[-1]:
            self._at = self.first
        for line in shown.text.splitlines():
            line = line.replace("/home/you", str(self.folder))
            own = self._at.wait_for(line, again=self._typed if PID.search(line) else "")
            self._own.update(zip(PID.findall(line), PID.findall(own), strict=True))


def test_a_reader_of_the_tutorial_loses_no_step(tmp_path):
    reader = Learner(tmp_path)
    try:
        for step in read(ROOT / "docs" / "tutorial.md").steps:
            reader.follow(step)
        screen = reader.first.screen()
    finally:
        reader.first.close()
        reader.second.close()
    assert "job digits succeeded: 600 steps" in screen
    losses = re.findall(r"^epoch (\d+): loss (\S+)", screen, re.MULTILINE)
    assert losses[0] == losses[1]  # alone, and on several workers
    assert [int(epoch) for epoch, _ in losses[1:]] == list(range(1, 301))
    assert (reader.folder / "digits.html").is_file()
