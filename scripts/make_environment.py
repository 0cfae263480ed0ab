#!/usr/bin/env python3
"""Make .venv at the root of the checkout: pinned packages, the Horovod wheel built against them, elasticdl itself (editable).

    scripts/setup.sh demo      # what `make demo` needs: torch, and Horovod for it
    scripts/setup.sh           # what everything needs: TensorFlow, Lightning, test tools as well, and Horovod for both

`setup.sh` finds the interpreter that runs this; only the standard library is there. A second run ends at once unless something that
the environment is made from has changed, and so does the smaller one after the larger. What is there already is kept.
Horovod is compiled while the libraries that torch needs are downloaded: its own headers are enough.

  HOROVOD_GPU_OPERATIONS  NCCL for a CUDA build of Horovod
  TORCH_INDEX_URL         where torch is taken from, as an index of builds for CPUs; all else comes from pip's own index
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(".venv")
LOG = VENV / "setup.log"
INPUTS = (
    "pyproject.toml",
    *(f"scripts/{name}" for name in ("setup.sh", "make_environment.py", "build_horovod.py", "horovod_edits.py")),
)
VARIABLES = ("HOROVOD_GPU_OPERATIONS", "TORCH_INDEX_URL")
LONGEST_SECONDS = 3600.0  # of one step, or of somebody else's set-up here
GIGABYTE = 1 << 30


class SetupError(Exception):
    """One line: what is wrong, where, and what would be right."""


@dataclass(frozen=True, slots=True)
class Level:
    """What an environment is for."""

    name: str
    packages: tuple[str, ...]
    # Installed before Horovod is compiled, with what they need: they are imported by that.
    imported: tuple[str, ...]
    # What the packages without CUDA's take of the disk, and pip's own files on the way.
    gigabytes: float


DEMO = Level("demo", ("-e", ".[torch,zoo]"), (), 2.5)
ALL = Level("all", ("-r", "requirements/dev.txt", "-e", ".[dev]"), ("tensorflow-cpu",), 5.5)
CUDA_GIGABYTES = 6.0  # CUDA's libraries, and pip's own files on the way


def main(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    level = {"demo": DEMO, "all": ALL}[arguments[0] if arguments else "all"]
    if is_made(level, inputs_hash()):
        return 0
    # pip leaves compiled modules behind only if it may; without them every start of a worker compiles torch again.
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    began = time.monotonic()
    with alone() as lock:
        if not is_made(level, inputs_hash()):
            make(level, Steps(lock.fileno(), Board(sys.stderr)))
            say(f"done in {duration(time.monotonic() - began)}")
    return 0


def make(level: Level, steps: Steps) -> None:
    interpreter = identity(sys.executable)
    for other in (DEMO, ALL):
        stamp(other).unlink(missing_ok=True)  # until it is whole again
    if identity(VENV / "bin/python") != interpreter or not works(VENV / "bin/python", "-m", "pip", "--version"):
        steps.run(
            f"making {VENV} with {interpreter}", [interpreter.rpartition(" ")[0], "-m", "venv", "--clear", str(VENV)]
        )
    python = str(VENV / "bin/python")
    pip = [python, "-m", "pip", "install", "-c", "requirements/lock.txt"]
    enough_disk(VENV, level.gigabytes)
    steps.run("tools to build with", [*pip, "-r", "requirements/horovod.txt"])
    index = ["--index-url", os.environ["TORCH_INDEX_URL"]] if os.environ.get("TORCH_INDEX_URL") else []
    steps.run("torch itself", [*pip, "--no-deps", *index, "torch"])
    if needs_cuda(VENV) and not any(VENV.glob("lib/python*/site-packages/nvidia")):
        enough_disk(VENV, CUDA_GIGABYTES + level.gigabytes / 2)
    for name in level.imported:
        steps.run(name, [*pip, name])
    with steps.beside("building Horovod", [python, "scripts/build_horovod.py"], horovod_variables(level)) as horovod:
        steps.run("what torch needs, elasticdl, and all else", [*pip, "--no-build-isolation", *level.packages])
        wheel = horovod.result()
    steps.run("installing Horovod", [*pip, "--no-deps", "--force-reinstall", wheel])
    stamp(level).write_text(inputs_hash())


def horovod_variables(level: Level) -> dict[str, str]:
    """TensorFlow may be there from before; who asks for the demo does not wait for it to be built for."""
    return {} if level is ALL else {"HOROVOD_WITHOUT_TENSORFLOW": "1"}


# ---- what there is ----


def stamp(level: Level) -> Path:
    return VENV / f".stamp-{level.name}"


def is_made(level: Level, inputs: str) -> bool:
    whole = any(stamp(each).exists() and stamp(each).read_text() == inputs for each in (level, ALL))
    return whole and works(VENV / "bin/python", "-c", "")


def inputs_hash() -> str:
    """Everything that the environment is made from, in one word."""
    found = hashlib.sha256()
    for path in (*sorted(Path("requirements").glob("*.txt")), *map(Path, INPUTS)):
        found.update(path.read_bytes())
    facts = [*(os.environ.get(name, "") for name in VARIABLES), str(ROOT), identity(sys.executable)]
    return hashlib.sha256((found.hexdigest() + repr(facts)).encode()).hexdigest()


def identity(python: str | Path) -> str:
    """The interpreter itself and its version, asked directly or through an environment made from it; nothing if there is none."""
    command = "import os, sys; print(os.path.realpath(sys._base_executable), sys.version.split()[0])"
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run([python, "-c", command], capture_output=True, text=True, timeout=60, check=False)
        return asked.stdout.strip()
    return ""


def works(*command: str | Path) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    return False


def needs_cuda(venv: Path) -> bool:
    texts = [path.read_text() for path in venv.glob("lib/python*/site-packages/torch-*.dist-info/METADATA")]
    return any(re.search(r"^Requires-Dist: (cuda|nvidia)-", text, re.MULTILINE) for text in texts)


def enough_disk(folder: Path, gigabytes: float) -> None:
    free = shutil.disk_usage(folder).free / GIGABYTE
    if free < gigabytes:
        raise SetupError(
            f"{folder.absolute()} has {free:.1f} GB left, and {gigabytes:.1f} are needed; "
            "a torch for CPUs takes 4 GB less: docs/install.md says how to have it"
        )


# ---- how it is done ----


@contextmanager
def alone(longest: float = LONGEST_SECONDS) -> Iterator[IO[str]]:
    """Two set-ups of one checkout come one after the other; programs that outlive a killed one still have the lock."""
    with (ROOT / "requirements/lock.txt").open() as lock:
        deadline, told = time.monotonic() + longest, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(f"another set-up of {ROOT} has run for {longest:.0f} s; end it first") from None
            if not told:
                say("waiting for another set-up of this checkout")
                told = True
            time.sleep(0.2)
        yield lock


class Board:
    """A line for each step with its time. On a terminal the last one changes while it lasts; elsewhere news are lines, too."""

    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._number = 0
        self._began = 0.0
        self._line = self._told = ""

    def begin(self, title: str) -> None:
        self._number += 1
        self._began, self._told = self._clock(), ""
        self._line = f"setup: {self._number}. {title}"
        self.show("...")

    def show(self, news: str) -> None:
        """How far it is, or what is done beside."""
        text = f"{self._line} {self._time()} {news}".rstrip()
        if self._live:
            self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif news and news != self._told:
            self._told = news
            self._write(f"{text}\n")

    def end(self, how: str = "done") -> None:
        self._write(f"{chr(13) + chr(27) + '[K' if self._live else ''}{self._line} {self._time()} {how}\n")

    def _time(self) -> str:
        return duration(self._clock() - self._began)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Beside:
    """A program that runs while others do; the last line that it has said tells how far it is."""

    def __init__(self, title: str, process: subprocess.Popen[str], steps: Steps) -> None:
        self._title, self._process, self._steps = title, process, steps
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.rstrip())

    @property
    def news(self) -> str:
        return f"({self.said[-1]})" if self.said and self._process.poll() is None else ""

    def result(self) -> str:
        """What it has printed, once it has ended; in a step of its own if it has not yet."""
        if self._process.poll() is None:
            self._steps.wait(self._title, self._process, self)
        self._reader.join(10.0)
        assert self._process.stdout is not None
        if self._process.returncode != 0:
            raise SetupError("\n".join(self.said[-30:]) or f"{self._title} ended with {self._process.returncode}")
        return self._process.stdout.read().strip()


class Steps:
    """Runs programs one after another, each a step on the board; whatever ends this, they end too."""

    def __init__(self, lock: int, board: Board) -> None:
        self._lock = lock
        self._board = board
        self._beside: Beside | None = None

    def run(self, title: str, command: Sequence[str]) -> None:
        with (LOG if VENV.is_dir() else Path(os.devnull)).open("a") as log:
            process = self._start(command, {}, log, subprocess.STDOUT)
            with ended(process):
                self.wait(title, process, self._beside)
        if process.returncode != 0:
            raise SetupError(f"{title}: `{' '.join(command[1:])}` ended with {process.returncode}{_why(LOG)}")

    @contextmanager
    def beside(self, title: str, command: Sequence[str], variables: dict[str, str]) -> Iterator[Beside]:
        process = self._start(command, variables, subprocess.PIPE, subprocess.PIPE)
        with ended(process):
            self._beside = Beside(title, process, self)
            yield self._beside
        self._beside = None

    def wait(self, title: str, process: subprocess.Popen[str], beside: Beside | None) -> None:
        self._board.begin(title)
        deadline = time.monotonic() + LONGEST_SECONDS
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    break
                self._board.show(beside.news if beside else "")
                if time.monotonic() > deadline:
                    raise SetupError(f"{title}: not done after {LONGEST_SECONDS:.0f} s")
        except BaseException:
            self._board.end("broken off")
            raise
        self._board.end()

    def _start(
        self, command: Sequence[str], variables: dict[str, str], out: IO[str] | int, errors: int
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # to be ended with all that it has started
            pass_fds=(self._lock,),
        )


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """With all that it has started: asked first, so that it tidies up, then made to."""
    try:
        yield
    finally:
        for number, patience in ((signal.SIGINT, 20.0), (signal.SIGKILL, 10.0)):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience)


def _why(log: Path) -> str:
    """pip's own reason, where to read on, and what helps."""
    lines = log.read_text(errors="replace").splitlines()[-200:] if log.exists() else []
    reasons = [line.strip() for line in lines if line.startswith("ERROR:") or "No space left" in line]
    found = f": {reasons[-1]}" if reasons else ""
    return f"{found}\nwhat it said is in {log}; run the same again: what is installed is kept"


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (SetupError, OSError) as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; run it again to go on")
        sys.exit(130)
