"""Dockerfiles, read, and judged by those rules of hadolint that matter here; `complaints` names them as hadolint does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
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


def complaints(text: str) -> set[str]:
    lines = read(text)
    return {*_of_stages(lines), *_of_commands(lines)}


def _of_stages(lines: list[Line]) -> Iterator[str]:
    seen: list[str] = []
    workdir = user = ""
    for line in lines:
        match line.word:
            case "FROM":
                if line.operands[0] not in seen and not re.search(r":(?!latest$).|@sha256:", line.operands[0]):
                    yield "DL3006"  # no tag, or one that moves
                seen += line.operands[2:3]
                workdir = user = ""
            case "WORKDIR":
                workdir = line.rest
            case "USER":
                user = line.rest
            case "ADD":
                yield "DL3020"  # COPY does for files, and URLs are never pinned
            case "COPY" if not (line.operands[-1].startswith("/") or workdir):
                yield "DL3045"
            case "CMD" | "ENTRYPOINT" if not line.rest.startswith("["):
                yield "DL3025"  # a shell would stand between the program and its signals
    # Stricter than hadolint: Kubernetes' runAsNonRoot takes a number only.
    if not re.fullmatch(r"[1-9]\d*(:\d+)?", user):
        yield "DL3002"


def _of_commands(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        for text in line.rest.split("&&") if line.word == "RUN" else ():
            command = shlex.split(text)
            if command[0] == "apt-get" and "update" in command and "rm -rf /var/lib/apt/lists" not in line.rest:
                yield "DL3009"
            if command[0] == "apt-get" and "install" in command and not {"-y", "--no-install-recommends"} <= {*command}:
                yield "DL3015"
            if command[0].startswith("pip") and "install" in command and "--no-cache-dir" not in command:
                yield "DL3042"
