"""Which of the drawn mutants a test notices: ``run.py MUTANTS RESULTS``, one JSON line for each.

In a clone of the last commit. For each mutant those tests run that coverage has seen run its statement (`contexts.py`), the most specific first, until one
fails. A test is specific that runs few lines of the package. Of a statement that runs only when its module is imported, the tests that run anything
else of the module. The run can be ended and started again: it goes on after the results that are there.
"""

import ast
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
MOST_TESTS = 25  # of which a mutant is shown
PATIENCE = 180.0  # seconds; a mutant that hangs its tests for so long is noticed
PYTEST = ["-q", "-x", "-n", "0", "--timeout", "90", "--tb", "no", "-p", "no:cacheprovider", "-m", "not slow"]


class Seen:
    """What each test runs of the package."""

    def __init__(self, data: Path) -> None:
        covered = CoverageData(str(data))
        covered.read()
        self._of_line: dict[str, dict[int, set[str]]] = {}
        self._lines: Counter[str] = Counter()
        for path in covered.measured_files():
            lines = {
                line: {each for each in contexts if "::" in each}
                for line, contexts in covered.contexts_by_lineno(path).items()
            }
            self._of_line["elasticdl/" + path.rpartition("/elasticdl/")[2]] = lines
            for tests in lines.values():
                self._lines.update(tests)

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """Of the statements at these lines; coverage knows a statement by its first line."""
        of_line, firsts = self._of_line.get(file, {}), first_lines((ROOT / file).read_text())
        run = {first for line in lines if (first := firsts.get(line, line)) in of_line}
        found = set().union(*(of_line[line] for line in run))
        if run and not found:
            found = found.union(*of_line.values())
        return sorted(found, key=lambda test: (self._lines[test], test))


def first_lines(code: str) -> dict[int, int]:
    """Of the innermost statement that each line belongs to."""
    found: dict[int, int] = {}
    statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt | ast.excepthandler)]
    for node in sorted(statements, key=lambda node: node.lineno):
        assert node.end_lineno is not None
        found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.lineno)
    return found


def preload() -> None:
    """The frameworks, which take longer to import than most tests; each mutant's tests run in a fork. Nothing of the package stays."""
    from elasticdl.triton_first import import_triton

    import_triton()
    for name in (
        "torch",
        "tensorflow",
        "keras",
        "lightning",
        "transformers.trainer",
        "hypothesis",
        "pandas",
        "sklearn",
        "grpc",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "elasticdl"]:
        del sys.modules[name]


def run_tests(clone: Path, tests: list[str], output: Path) -> NoReturn:
    """In a fork."""
    os.setsid()
    os.chdir(clone)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(clone))
    code = pytest.main([*PYTEST, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def noticed(clone: Path, tests: list[str]) -> tuple[str, str]:
    """``found``, ``hangs``, ``survives`` or ``untested``; and the test that has found it."""
    if not tests:
        return "untested", ""
    output = clone.with_name("output")
    if (child := os.fork()) == 0:
        run_tests(clone, tests, output)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs", ""
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have left
    failed = [
        line.split()[1]
        for line in output.read_text(errors="replace").splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return ("survives" if ended[1] == 0 else "found"), (failed or [""])[0]


def mutated(code: str, edits: list[tuple[int, list[str], list[str]]]) -> str:
    lines = code.splitlines(keepends=True)
    for at, old, new in sorted(edits, reverse=True):
        if lines[at : at + len(old)] != old:
            raise SystemExit("the mutants were drawn from another state of the package: draw them anew")
        lines[at : at + len(old)] = new
    return "".join(lines)


def judge(clone: Path, seen: Seen, mutant: dict[str, Any]) -> dict[str, Any]:
    path = clone / mutant["file"]
    code = path.read_text()
    lines = [line + 1 for at, old, _ in mutant["edits"] for line in range(at, at + max(len(old), 1))]
    tests = seen.tests(mutant["file"], lines)
    path.write_text(mutated(code, mutant["edits"]))
    try:
        outcome, test = noticed(clone, tests[:MOST_TESTS])
    finally:
        path.write_text(code)
    change = [["".join(old).strip(), "".join(new).strip()] for _, old, new in mutant["edits"]]
    place = f"{mutant['file']}:{lines[0]}"
    return {"place": place, "outcome": outcome, "test": test, "change": change, "tests": len(tests)}


def main(mutants: str, results: str) -> None:
    drawn, output = json.loads(Path(mutants).read_text()), Path(results)
    done = len(output.read_text().splitlines()) if output.exists() else 0
    seen = Seen(ROOT / ".coverage")
    preload()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for mutant in drawn[done:]:
            result = judge(clone, seen, mutant)
            with output.open("a") as file:
                file.write(json.dumps(result) + "\n")
    counts: defaultdict[str, int] = defaultdict(int)
    for line in output.read_text().splitlines():
        counts[json.loads(line)["outcome"]] += 1
    print(json.dumps({"mutants": len(drawn), **counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
