"""A command line that runs Python, taken apart."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FLAGS = frozenset("bBdOPqRsuv")  # of the interpreter, without an argument, that mean nothing for what is run
_WITH_ARGUMENT = frozenset("WX")


class UnclearCommand(Exception):
    """The command runs another Python, or has options that do more than name the program."""


class NoSuchProgram(UnclearCommand):
    """The script does not exist."""


@dataclass(frozen=True, slots=True)
class Program:
    """``kind``: how Python is given the program: "file", "module" (-m) or "code" (-c)."""

    kind: str
    target: str


def program_of(argv: Sequence[str]) -> Program:
    """The program that a command runs.

    Raises:
        UnclearCommand: that can't be told.
    """
    if not _is_this_python(argv[0]):
        raise UnclearCommand(f"{argv[0]} is not {sys.executable}")
    words = iter(argv[1:])
    for word in words:
        if word in ("-", "--") or not word.startswith("-"):
            break
        if word.startswith("--"):
            raise UnclearCommand(f"option {word} of Python")
        for place, letter in enumerate(word[1:], 2):
            if letter in "mc":
                return Program("module" if letter == "m" else "code", word[place:] or next(words, ""))
            if letter in _WITH_ARGUMENT:
                if not word[place:]:
                    next(words, "")
                break
            if letter not in _FLAGS:
                raise UnclearCommand(f"option -{letter} of Python")
    else:
        raise UnclearCommand("Python is given no program")
    if word != "-" and not Path(word).exists():
        raise NoSuchProgram(f"there is no {Path(word).absolute()}")
    if not Path(word).is_file():
        raise UnclearCommand(f"{word} is no file")
    return Program("file", word)


def _is_this_python(name: str) -> bool:
    """Whether it is this file in this folder: the Python of an environment is a link to another Python."""
    path, other = os.path.abspath(shutil.which(name) or name), os.path.abspath(sys.executable)
    return os.path.dirname(path) == os.path.dirname(other) and os.path.realpath(path) == os.path.realpath(other)
