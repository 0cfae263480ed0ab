"""docs/tutorial.md as its reader types it: in two terminals, each command when the screen shows what the page shows before it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from elasticdl.common.process_group import tethered
from tests.documents.reading import ROOT, Command, How, PythonBlock, changed, read
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

DEADLINE = 120.0
AGAIN = 10.0  # a command that looks at the job takes less
PID = re.compile(r"pid (\d+)")
NUMBERS = re.compile(r"(?<!worker )\d[\d.,: -]*")


class Terminal:
    """A shell that reads what is typed when the command before has ended."""

    def __init__(self, folder, screen, environment):
        self._screen, self._seen = screen, 0  # lines
        with screen.open("wb") as sink:
            streams = {"stdin": subprocess.PIPE, "stdout": sink, "stderr": subprocess.STDOUT}
            how = {**streams, "start_new_session": True, "text": True, "bufsize": 1}
            self._shell = subprocess.Popen(tethered(["bash"]), cwd=folder, env=environment, **how)

    def screen(self):
        return self._screen.read_text()

    def type(self, text):
        self._shell.stdin.write(f"{text}\n")

    def wait_for(self, line, again=""):
        """The first line, of those after what was waited for last, that begins as this one; but for a worker's, numbers may differ.

        ``again``: what is typed again and again meanwhile.
        """
        due = [time.monotonic() + AGAIN]

        def shown():
            if again and time.monotonic() > due[-1]:
                self.type(again)
                due.append(time.monotonic() + AGAIN)
            lines = list(enumerate(self.screen().splitlines()))[self._seen :]
            return [each for each in lines if without_numbers(each[1]).startswith(without_numbers(line))]

        found = wait_until(shown, lambda: f"`{line}` is not on the screen:\n{self.screen()}", DEADLINE, poll=0.05)
        self._seen, text = found[0]
        return text

    def close(self):
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait(timeout=DEADLINE)


def without_numbers(line):
    """Of `worker 3` the number stays: workers start in no certain order."""
    return " ".join(NUMBERS.sub("# ", line).split())


class Learner:
    """Somebody who has installed the packages, and reads the page from its top."""

    def __init__(self, folder):
        self.folder = folder / "you"
        activate = self.folder / "digits" / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{sys.prefix}/bin:$PATH"\n')
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ELASTICDL_HOME")}
        environment = {**kept, "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        self.first, self.second = (Terminal(self.folder, folder / name, environment) for name in ("first", "second"))
        self.first.type("source digits/.venv/bin/activate")
        self._at, self._file, self._typed = self.first, None, ""
        self._own = {}  # numbers of the page, and those of this reader's screen

    def follow(self, step):
        if isinstance(step, PythonBlock):
            self._file = self.folder / step.file
            self._file.write_text(step.code)
        elif isinstance(step, Command):
            self._type(step)
        elif step.language == "diff":
            self._file.write_text(changed(self._file.read_text(), step.text))
        else:
            self._look(step)

    def _type(self, command):
        text = command.text
        if command.how is How.MARKED:
            if "yours" not in command.mark:
                return  # packages are there
            text = re.sub(r"\d{2,}", lambda number: self._own[number[0]], text)
        self._at = self.first if command.how is How.RUN else self.second
        self._at.type(text)
        self._typed = text

    def _look(self, shown):
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
