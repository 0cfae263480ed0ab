#!/usr/bin/env python3
"""Make .venv at the root of the checkout: pinned packages, the Horovod wheel built against them, elasticdl itself (editable).

    scripts/setup.sh demo      # what `make demo` needs: torch, and Horovod for it
    scripts/setup.sh           # what everything needs: TensorFlow, Lightning, test tools as well, and Horovod for both

`setup.sh` finds the interpreter that runs this; only the standard library is there. A second run ends at once unless something that
the environment is made from has changed, and so does the smaller one after the larger. What is there already is kept.
Horovod is compiled while the libraries that torch needs are downloaded: its own headers are enough.

  HOROVOD_GPU_OPERATIONS  NCCL for a CUDA build of Horovod
  TORCH_INDEX_URL         where torch is taken from, as an index of builds for CPUs; all else comes from pip's own index

With `--is-made` it makes nothing, and its exit code tells: 0 if there is nothing to do, else 1.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from build_horovod import lock_within
from setup_steps import LONGEST_SECONDS, Board, SetupError, Steps, duration, end_by_signals, say

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(".venv")
LOG = Path("build/setup.log")  # not in .venv, which is made anew now and then
# What pip unpacks on its way. Not in /tmp: that may be another disk than the one that is looked at, and small; and who is
# killed leaves gigabytes there.
SCRATCH = VENV / "tmp"
MADE_FOR = VENV / ".made-for"  # the index that torch is from; written once the bare environment is whole
INPUTS = (
    "pyproject.toml",
    *(f"scripts/{name}" for name in ("setup.sh", "make_environment.py", "build_horovod.py", "horovod_edits.py")),
)
VARIABLES = ("HOROVOD_GPU_OPERATIONS", "TORCH_INDEX_URL")
GIGABYTE = 1 << 30


@dataclass(frozen=True, slots=True)
class Level:
    """What an environment is for."""

    name: str
    packages: tuple[str, ...]
    # Installed before Horovod is compiled, with what they need: they are imported by that.
    imported: tuple[str, ...]
    gigabytes: float  # on the disk, without CUDA's libraries


DEMO = Level("demo", ("-e", ".[torch,zoo]"), (), 1.7)
ALL = Level("all", ("-r", "requirements/dev.txt", "-e", ".[dev]"), ("tensorflow-cpu",), 3.9)
LEVELS = {"": ALL, "demo": DEMO}
CUDA_GIGABYTES = 3.3
# Of what is installed, so much is downloaded; pip has it on the disk until a step ends, and so much of one step at most.
DOWNLOADED = 0.65
STEP_GIGABYTES, CUDA_STEP_GIGABYTES = 0.8, 2.8


def main(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    asked = " ".join(argument for argument in arguments if argument != "--is-made")
    if asked not in LEVELS:
        say(f"{asked}: expected demo, or nothing")
        return 2
    level = LEVELS[asked]
    if is_made(level, inputs_hash()):
        return 0
    if "--is-made" in arguments:
        return 1
    # pip leaves compiled modules behind only if it may; without them every start of a worker compiles torch again.
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    end_by_signals()
    began = time.monotonic()
    with alone() as lock:
        inputs = inputs_hash()  # before anything is installed: what is edited meanwhile is not
        if not is_made(level, inputs):
            make(level, inputs, Steps(lock.fileno(), Board(sys.stderr), LOG))
            say(f"done in {duration(time.monotonic() - began)}")
    return 0


def make(level: Level, inputs: str, steps: Steps) -> None:
    for other in LEVELS.values():
        stamp(other).unlink(missing_ok=True)  # until it is whole again
    index = os.environ.get("TORCH_INDEX_URL", "")
    interpreter = identity(sys.executable)
    if not is_sound(interpreter, index):
        steps.run(
            f"making {VENV} with {interpreter}", [interpreter.rpartition(" ")[0], "-m", "venv", "--clear", str(VENV)]
        )
        MADE_FOR.write_text(index)
    forget_half_installed()
    with scratch():
        install(level, index, steps)
    stamp(level).write_text(inputs)


def install(level: Level, index: str, steps: Steps) -> None:
    python = str(VENV / "bin/python")
    pip = [python, "-m", "pip", "install", "-c", "requirements/lock.txt"]
    enough_disk(level.gigabytes, STEP_GIGABYTES)
    steps.run("tools to build with", [*pip, "-r", "requirements/horovod.txt"])
    steps.run("torch itself", [*pip, "--no-deps", *(["--index-url", index] if index else []), "torch"])
    if needs_cuda():
        advice = "; a torch for CPUs takes 4 GB less: docs/install.md says how to have it"
        enough_disk(level.gigabytes + CUDA_GIGABYTES, CUDA_STEP_GIGABYTES, advice)
    for name in level.imported:
        steps.run(name, [*pip, name])
    with steps.beside("building Horovod", [python, "scripts/build_horovod.py"], horovod_variables(level)) as horovod:
        steps.run("what torch needs, elasticdl, and all else", [*pip, "--no-build-isolation", *level.packages])
        wheel = horovod.result()
    steps.run("installing Horovod", [*pip, "--no-deps", "--force-reinstall", wheel])


def horovod_variables(level: Level) -> dict[str, str]:
    """TensorFlow may be there from before; who asks for the demo does not wait for it to be built for."""
    return {} if level is ALL else {"HOROVOD_WITHOUT_TENSORFLOW": "1"}


@contextmanager
def alone(longest: float = LONGEST_SECONDS) -> Iterator[IO[str]]:
    """Two set-ups of one checkout come one after the other; programs that outlive a killed one still have the lock."""
    with (ROOT / "requirements/lock.txt").open() as lock:
        if not lock_within(lock, longest, lambda: say("waiting for another set-up of this checkout")):
            raise SetupError(f"another set-up of {ROOT} has run for {longest:.0f} s; end it first")
        yield lock


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


def is_sound(interpreter: str, index: str) -> bool:
    """Whether there is an environment to go on from. With torch from another index there is none: pip would keep the one that
    is there, or with it all of CUDA's libraries. Neither is there after a kill while pip replaced a package: it leaves `~` names."""
    return (
        identity(VENV / "bin/python") == interpreter
        and MADE_FOR.exists()
        and MADE_FOR.read_text() == index
        and not any(VENV.glob("lib/python*/site-packages/~*"))
        and works(VENV / "bin/python", "-m", "pip", "--version")
    )


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


def forget_half_installed() -> None:
    """pip takes a package for installed as soon as its metadata are there. Its programs come after them, and `INSTALLER` last:
    of a killed set-up the one without it is installed again."""
    for info in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)


def needs_cuda() -> bool:
    texts = [path.read_text() for path in VENV.glob("lib/python*/site-packages/torch-*.dist-info/METADATA")]
    return any(re.search(r"^Requires-Dist: (cuda|nvidia)-", text, re.MULTILINE) for text in texts)


# ---- the disk ----


@contextmanager
def scratch() -> Iterator[None]:
    """Temporary files of the programs that are run; of a killed set-up they are removed by the next."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir()
    os.environ["TMPDIR"] = str(SCRATCH.absolute())
    try:
        yield
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


def enough_disk(gigabytes: float, step: float, advice: str = "") -> None:
    """For an environment of that size, of which a part may be there, with so much that is downloaded at once. If there is no
    room to keep that for the next time, too, pip does not.

    Raises:
        SetupError: there is not enough.
    """
    missing = max(0.0, gigabytes - size(VENV))
    needed = missing + min(DOWNLOADED * missing, step)
    free = shutil.disk_usage(VENV).free / GIGABYTE
    if free < needed:
        raise SetupError(f"{VENV.absolute()} has {free:.1f} GB left, and {needed:.1f} are needed for a while{advice}")
    if free < needed + DOWNLOADED * missing:
        os.environ["PIP_NO_CACHE_DIR"] = "1"


def size(folder: Path) -> float:
    """In GB, as the disk counts."""
    blocks = sum(os.lstat(os.path.join(at, name)).st_blocks for at, _, names in os.walk(folder) for name in names)
    return blocks * 512 / GIGABYTE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (SetupError, OSError) as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; run it again to go on")
        sys.exit(130)
