"""Dockerfiles, read."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction, its continuation lines joined and the comments between them left out."""

    word: str
    rest: str

    @property
    def flags(self) -> dict[str, str]:
        return dict(re.findall(r"^--(\w+)=(\S+)", self.rest))

    @property
    def operands(self) -> list[str]:
        return [part for part in self.rest.split() if not part.startswith("--")]


def read(text: str) -> list[Line]:
    """The instructions; images by the names that they have unless somebody gives the argument that FROM names."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    split = [line.strip().split(None, 1) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]
    lines = [Line(word.upper(), rest.strip()) for word, rest in split]
    defaults = dict(line.rest.split("=", 1) for line in lines if line.word == "ARG" and "=" in line.rest)

    def named(line: Line) -> Line:
        return Line(line.word, re.sub(r"\$(\w+)", lambda name: defaults.get(name[1], ""), line.rest))

    return [named(line) if line.word == "FROM" else line for line in lines]


def stages(lines: list[Line]) -> list[str]:
    return [line.operands[2] for line in lines if line.word == "FROM" and len(line.operands) == 3]
