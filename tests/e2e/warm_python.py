"""Scripts that run alone, each in a fork of one Python that has imported what they import: a start takes no three seconds.

`run_alone` is for what an elastic run is compared with, and for scripts that end before they train. Jobs are not started so:
their processes are the subject.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.tether import die_with_parent, tethered

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 120.0


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


class WarmPython:
    """A process that has imported these modules, and runs one script at a time."""

    def __init__(self, modules: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        # A script whose loader's processes stay leaves the folder of multiprocessing's fork server: PyTorch has it so.
        self._temporary = tempfile.TemporaryDirectory(prefix="elasticdl-")
        self._process = subprocess.Popen(
            tethered([sys.executable, str(Path(__file__)), *modules]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": self._temporary.name, **env},
        )

    def run(self, script: str | Path, *arguments: str | Path, **env: str) -> Ended:
        """As ``python SCRIPT ARGUMENTS``, in the folder of the repository."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = self._folder / "out", self._folder / "err"
        request = [list(map(str, [script, *arguments])), env, str(out), str(err), DEADLINE]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], 2 * DEADLINE)[0]:
            self._process.kill()
        answer = self._process.stdout.readline()
        assert answer, f"it ended: {self._process.wait(DEADLINE)}"
        return Ended(int(answer), out.read_text(), err.read_text())

    def run_well(self, script: str | Path, *arguments: str | Path, **env: str) -> str:
        """What a script has said that ended with 0."""
        ended = self.run(script, *arguments, **env)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._temporary.cleanup()


def fork_for(script: Sequence[str], env: Mapping[str, str], out: str, err: str, deadline: float) -> bool:
    """True in the fork; elsewhere it says how the fork has ended."""
    child = os.fork()
    if child > 0:
        print(end_of(child, deadline), flush=True)
        return False
    die_with_parent(signal.SIGKILL)
    os.setsid()
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(env)
    sys.argv[:] = script
    sys.path[0] = str(Path(script[0]).parent)
    return True


def end_of(child: int, deadline: float) -> int:
    """The exit code of a fork, or minus a signal's number. It is killed if it takes longer; what it has started, always."""
    ended = os.pidfd_open(child)
    select.select([ended], [], [], deadline)
    os.close(ended)
    for kill in (os.killpg, os.kill):  # it may not have become the leader of a group yet
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    import gc
    import importlib

    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    gc.freeze()
    for _line in sys.stdin:
        if fork_for(*json.loads(_line)):
            _main = globals()
            _program = compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec", dont_inherit=True)
            for _name in [each for each in _main if not each.startswith("_")]:
                del _main[_name]
            _main["__file__"] = _program.co_filename
            exec(_program, _main)
            break
