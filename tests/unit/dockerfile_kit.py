"""Dockerfiles, read, and judged by those rules of hadolint that matter here; `complaints` names them as hadolint does."""

from __future__ import annotations

import json
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
    lines = _split(text)
    defaults = dict(line.rest.split("=", 1) for line in lines if line.word == "ARG" and "=" in line.rest)
    return [
        Line(line.word, re.sub(r"\$(\w+)", lambda name: defaults.get(name[1], ""), line.rest))
        if line.word == "FROM"
        else line
        for line in lines
    ]


def _split(text: str) -> list[Line]:
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", kept)
    split = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Line(word.upper(), rest.strip()) for word, rest in split]


def complaints(text: str) -> set[str]:
    lines = read(text)
    return {*_of_images(lines), *_of_the_end(lines), *_of_copies(lines), *_of_commands(lines)}


def stages(lines: list[Line]) -> list[str]:
    return [line.operands[2] for line in lines if line.word == "FROM" and len(line.operands) == 3]


def _of_images(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        if line.word == "FROM" and line.operands[0] not in stages(lines):
            name = line.operands[0].rpartition("/")[2]
            if not re.search(r":.|@sha256:[0-9a-f]{64}$", name):
                yield "DL3006"  # no tag
            if name.endswith(":latest"):
                yield "DL3007"


def _of_the_end(lines: list[Line]) -> Iterator[str]:
    """What is true of the image that comes out: that of the last stage."""
    start = max(index for index, line in enumerate(lines) if line.word == "FROM")
    users = [line.rest for line in lines[start:] if line.word == "USER"]
    # Stricter than hadolint: Kubernetes' runAsNonRoot takes a number only.
    if not users or not re.fullmatch(r"[1-9]\d*(:\d+)?", users[-1]):
        yield "DL3002"
    for line in lines:
        if line.word == "WORKDIR" and not line.rest.startswith(("/", '"/')):
            yield "DL3000"
        if line.word in ("CMD", "ENTRYPOINT") and not _is_json(line.rest):
            yield "DL3025"


def _of_copies(lines: list[Line]) -> Iterator[str]:
    seen: list[str] = []
    has_workdir = False
    for line in lines:
        if line.word == "FROM":
            seen += line.operands[2:3]
            has_workdir = False
        has_workdir = has_workdir or line.word == "WORKDIR"
        if line.word == "ADD":
            yield "DL3020"  # COPY does for files, and URLs are never pinned
        if line.word == "COPY":
            if "from" in line.flags and line.flags["from"] not in seen:
                yield "DL3022"
            if not line.operands[-1].startswith("/") and not has_workdir:
                yield "DL3045"


def _of_commands(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        if line.word != "RUN":
            continue
        commands = [shlex.split(command) for command in line.rest.split("&&")]
        for command in commands:
            yield from _of_apt(command, line.rest)
            if command[0] in ("pip", "pip3") and "install" in command and "--no-cache-dir" not in command:
                yield "DL3042"
            if "sudo" in command:
                yield "DL3004"
            if command[0] == "cd":
                yield "DL3003"


def _of_apt(command: list[str], whole: str) -> Iterator[str]:
    if command[0] == "apt":
        yield "DL3027"
    if command[:2] == ["apt-get", "update"] and not re.search(r"rm -rf /var/lib/apt/lists", whole):
        yield "DL3009"
    if command[0] == "apt-get" and "install" in command:
        if not {"-y", "--yes", "-qy", "-yq"} & set(command):
            yield "DL3014"
        if "--no-install-recommends" not in command:
            yield "DL3015"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except json.JSONDecodeError:
        return False
