"""Stacks of threads, in a few lines for people, and as `faulthandler` writes them.

The user's own lines of the training thread come first, the innermost before the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.reason import LIBRARIES, STANDARD, is_users, shown

MOST_LINES = 40
MOST_OF_LINE = 200
# Of a thread that is not the training's.
OTHER_LINES = 3
OTHER_THREADS = 8
DUMPED = "Timeout ("  # how a dump begins that a timer has made
CRASHED = "Fatal Python error: "  # how the dump of a crash begins
# How it ends, since Python 3.10, and what a shell around the program and multiprocessing's tracker of resources add.
_SHELL = "Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"
_TRACKER = r"resource_tracker|^  warnings\.warn"
_MODULES = re.compile(rf"^Extension modules: .*\(total: \d+\)(\n.*({_SHELL}|{_TRACKER}).*)*\s*\Z", re.MULTILINE)
_SAID_BEFORE = 5  # lines: C++ writes what an exception says before it aborts
_MACHINERY = '  File "<frozen importlib.'
# Comes after a dump in a log, which can't be taken back.
GOES_ON = "elasticdl: this process goes on, and stands there no more"
_LINE = re.compile(r'  File "(?P<path>.*)", line (?P<number>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class Line:
    path: str
    number: int
    function: str

    @property
    def is_users(self) -> bool:
        return is_users(self.path)

    def __str__(self) -> str:
        """As in ``train.py:31 in load``."""
        path = self.path
        for mark in LIBRARIES:
            path = path.rpartition(f"/{mark}/")[2]
        if path == self.path:
            path = STANDARD.split(path)[-1] if STANDARD.search(path) else shown(Path(path))
        return f"{path}:{self.number} in {self.function}"[-MOST_OF_LINE:]


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread, the innermost call first."""

    thread: str
    lines: tuple[Line, ...]

    @property
    def where(self) -> str:
        """The innermost line of the user's own; without one, of any library that is not Python's own."""
        users = [line for line in self.lines if line.is_users]
        others = [line for line in self.lines if not STANDARD.search(line.path) or "-packages/" in line.path]
        return str(next(iter((*users, *others, *self.lines)), ""))


def describe(training: Stack, others: Sequence[Stack] = ()) -> list[str]:
    """The stacks in at most `MOST_LINES` lines: the user's of the training thread, the rest of it, then other threads'."""
    lines = [str(line) for line in training.lines if line.is_users]
    rest = [str(line) for line in training.lines if not line.is_users]
    lines += ["called from there, innermost first:" if lines else "innermost first:", *rest] if rest else []
    told = []
    for stack in others[:OTHER_THREADS]:
        told += [f"thread {stack.thread}:", *(f"  {line}" for line in stack.lines[:OTHER_LINES])]
    return [*lines[: MOST_LINES - min(len(told), MOST_LINES // 2)], *told][:MOST_LINES]


def parse(text: str) -> list[Stack]:
    """The stacks of the last dump of `faulthandler` in a text, the main thread's first.

    Lines that others have printed in between are passed over. Empty if there is no dump, or the process went on after it.
    """
    stacks: list[Stack] = []
    if (begin := text.rfind(DUMPED)) <= text.rfind(GOES_ON):
        return stacks
    for line in text[begin:].splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")) and "(most recent call first)" in line:
            stacks.append(Stack(line.partition(" (")[0].split()[-1], ()))
        elif stacks and (found := _LINE.fullmatch(line)):
            at = Line(found["path"], int(found["number"]), found["function"])
            stacks[-1] = Stack(stacks[-1].thread, (*stacks[-1].lines, at))
    return stacks[::-1]  # CPython lists the newest thread first


def last_words(text: str) -> list[str]:
    """The crash with which a log ends, as `faulthandler` has written it: the lines just before, then the stacks, innermost call
    first. The frames of Python's import system and the list of compiled modules are left out, as they hide the rest.
    Empty if the log does not end with a crash.
    """
    begin = text.rfind(CRASHED)
    end = _MODULES.search(text, begin) if begin != -1 else None
    if end is None:
        return []
    stacks = [line for line in text[begin : end.start()].splitlines() if line and _MACHINERY not in line]
    return [*text[:begin].splitlines()[-_SAID_BEFORE:], *stacks]
