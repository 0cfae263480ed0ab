#!/usr/bin/env python3
"""Build the Horovod wheel against the installed frameworks, torch and TensorFlow, once per user.

Horovod 0.28.1 ships only as source and predates today's frameworks; a few edits are
enough (`horovod_edits.py` says why each is needed). The wheel is kept in the user's cache
directory under a name that holds every version it depends on, so a second call only prints
its path. Variables of Horovod's own change what is built: ``HOROVOD_GPU_OPERATIONS=NCCL`` for CUDA,
``HOROVOD_WITHOUT_TENSORFLOW=1`` or ``HOROVOD_WITHOUT_PYTORCH=1`` for one framework alone.

    python scripts/build_horovod.py          # prints the path of the wheel on stdout
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from horovod_edits import EDITS

HOROVOD_VERSION = "0.28.1"
SCRATCH = "building-"  # begins the name of what the next build may remove
# One compiler takes 1.8 GB with torch's headers.
COMPILER_BYTES = 2 << 30
DISK_BYTES = 1 << 30
OTHERS_SECONDS = 3600.0  # somebody else's build


class BuildError(Exception):
    """The wheel could not be built; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class Framework:
    """What Horovod is built for, by the name that its variables have for it."""

    variable: str
    label: str
    # Of one module, the first that is installed counts.
    packages: tuple[str, ...]

    def version(self) -> str:
        for name in self.packages:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        raise BuildError(
            f"{self.packages[-1]} is not installed: `make setup` installs the pinned version; "
            f"HOROVOD_WITHOUT_{self.variable}=1 builds Horovod without it"
        )


FRAMEWORKS = (
    Framework("PYTORCH", "torch", ("torch",)),
    Framework("TENSORFLOW", "tf", ("tensorflow-cpu", "tensorflow")),
)


def wanted(variables: Mapping[str, str]) -> list[Framework]:
    """The frameworks that no variable leaves out; as in Horovod's own build only "1" does."""
    chosen = [framework for framework in FRAMEWORKS if variables.get(f"HOROVOD_WITHOUT_{framework.variable}") != "1"]
    if not chosen:
        raise BuildError("HOROVOD_WITHOUT_PYTORCH=1 and HOROVOD_WITHOUT_TENSORFLOW=1 leave nothing to build for")
    return chosen


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticdl"


def cache_key(versions: Mapping[str, str], gpu_operations: str) -> str:
    """Every version that the binary depends on, by the framework's label, and the edits, in one directory name."""
    edits = hashlib.sha256(repr(EDITS).encode()).hexdigest()[:8]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    frameworks = "-".join(f"{label}{version}" for label, version in versions.items())
    ops = f"-{gpu_operations.lower()}" if gpu_operations else ""
    return f"horovod-{HOROVOD_VERSION}-{python}-{frameworks}{ops}-{edits}"


def cached(cache: Path, versions: Mapping[str, str], gpu_operations: str) -> Path | None:
    """The folder of a wheel that will do. One that serves TensorFlow as well does for torch alone."""
    exact = cache_key(versions, gpu_operations)
    found = [cache / exact]
    if list(versions) == ["torch"] and cache.is_dir():
        wider = re.escape(cache_key({**versions, "tf": "VERSION"}, gpu_operations)).replace("VERSION", "[^-]+")
        found += sorted(folder for folder in cache.iterdir() if re.fullmatch(wider, folder.name))
    return next((folder for folder in found if any(folder.glob("horovod-*.whl"))), None)


def fetch_source(into: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--no-binary", ":all:", "-d", str(into), f"horovod=={HOROVOD_VERSION}"]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        raise BuildError(f"the source of Horovod {HOROVOD_VERSION} could not be downloaded; pip says why above")
    # Not tarfile's own `filter`: Python 3.11.2, Debian 12's, does not have it yet.
    shutil.unpack_archive(into / f"horovod-{HOROVOD_VERSION}.tar.gz", into)
    return into / f"horovod-{HOROVOD_VERSION}"


def apply_edits(source: Path) -> None:
    for name, old, new in EDITS:
        path = source / name
        text = path.read_text()
        if old not in text:
            raise BuildError(
                f"{name} has no line {old!r}: this is not the Horovod {HOROVOD_VERSION} that the edits are for"
            )
        path.write_text(text.replace(old, new, 1))


def compilers(cores: int, free_bytes: int) -> int:
    """How many may run at once."""
    return max(1, min(cores, free_bytes // COMPILER_BYTES))


def free_memory(root: Path = Path("/")) -> int:
    """What this machine has left, and the container if it says so."""
    found = re.search(r"MemAvailable: *(\d+)", (root / "proc/meminfo").read_text())
    limits = [int(found[1]) << 10] if found else []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (root / name).read_text().strip() if (root / name).exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits, default=COMPILER_BYTES)


def torch_facts() -> dict[str, str]:
    """What Horovod asks torch for, without importing it: its libraries need not be there. Empty if it has to be asked."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    version = runpy.run_path(str(folder / "version.py"))
    if version.get("hip"):
        return {}
    return {"HOROVOD_TORCH_FOLDER": str(folder), "HOROVOD_TORCH_VERSION": version["__version__"]}


def build_environment(frameworks: list[Framework], gpu_operations: str) -> dict[str, str]:
    flags = {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        # A framework that is asked for and not found stops the build, instead of being left out silently.
        **{f"HOROVOD_WITH_{framework.variable}": "1" for framework in frameworks},
        "MAKEFLAGS": f"-j{compilers(len(os.sched_getaffinity(0)), free_memory())}",
        # The cmake of this environment, not a newer one that dropped the policies Horovod asks for.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment = {name: value for name, value in os.environ.items() if name != "HOROVOD_GPU_OPERATIONS"}
    return {**environment, **flags, **({"HOROVOD_GPU_OPERATIONS": gpu_operations} if gpu_operations else torch_facts())}


def compile_wheel(source: Path, out: Path, log: Path, env: dict[str, str], lock: int) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    with (
        log.open("w") as sink,
        subprocess.Popen(
            [*pip, "-w", str(out), str(source)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(lock,),  # whoever outlives this process still has the lock
        ) as build,
    ):
        assert build.stdout is not None
        shown = -10
        for line in build.stdout:
            sink.write(line)
            match = re.search(r"\[ *(\d+)%\]", line)
            if match and (int(match[1]) >= shown + 10 or int(match[1]) < shown):
                shown = int(match[1])
                say(f"building Horovod: {shown}%")
    if build.returncode != 0 or not any(out.glob("horovod-*.whl")):
        tail = "".join(log.read_text().splitlines(keepends=True)[-25:])
        raise BuildError(f"the build of Horovod failed; its last lines were:\n{tail}\nthe whole log: {log}")


@contextmanager
def alone(cache: Path, longest: float = OTHERS_SECONDS) -> Iterator[IO[str]]:
    """Two set-ups at once build one wheel. What a killed build has left is removed."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "build.lock").open("w") as lock:
        if not lock_within(lock, longest, lambda: say("waiting for another build of Horovod")):
            raise BuildError(f"somebody has held {cache}/build.lock for {longest:.0f} s; end it first")
        for left in cache.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield lock


def lock_within(file: IO[str], longest: float, waiting: Callable[[], None]) -> bool:
    """Whether the file could be locked in so many seconds, until it is closed here and in every program that was given it.
    `waiting` is called once if somebody else has it."""
    deadline, told = time.monotonic() + longest, False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        if not told:
            waiting()
            told = True
        time.sleep(0.2)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build(cache: Path, frameworks: list[Framework], versions: Mapping[str, str], gpu_operations: str) -> Path:
    with alone(cache) as lock:
        folder = cached(cache, versions, gpu_operations)
        if folder is not None:
            return folder
        free = shutil.disk_usage(cache).free
        if free < DISK_BYTES:
            raise BuildError(f"{cache} has {free >> 20} MB left; the build takes {DISK_BYTES >> 20} for a while")
        target = cache / cache_key(versions, gpu_operations)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=cache) as scratch:
            source = fetch_source(Path(scratch))
            apply_edits(source)
            out = Path(scratch) / "wheel"
            environment = build_environment(frameworks, gpu_operations)
            compile_wheel(source, out, cache / "horovod-build.log", environment, lock.fileno())
            shutil.rmtree(target, ignore_errors=True)  # without a wheel in it
            out.rename(target)
        return target


def main() -> int:
    gpu_operations = os.environ.get("HOROVOD_GPU_OPERATIONS", "")
    cache = cache_folder()
    frameworks = wanted(os.environ)
    versions = {framework.label: framework.version() for framework in frameworks}
    folder = cached(cache, versions, gpu_operations) or build(cache, frameworks, versions, gpu_operations)
    print(next(folder.glob("horovod-*.whl")))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BuildError, OSError) as error:
        sys.exit(f"build_horovod: {error}")
    except KeyboardInterrupt:
        sys.exit("build_horovod: stopped; nothing half-built is left")
