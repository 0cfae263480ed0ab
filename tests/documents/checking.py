"""Whether the words of a command exist, without running it: commands, options, programs, files, modules."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import itertools
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import click

from elasticdl.cli.__main__ import COMMANDS, TABLE
from elasticdl.cli.commands.start import SCRIPT_GROUPS, make_spec
from elasticdl.cli.parsing import Command, did_you_mean, underscored
from elasticdl.common.errors import UserError
from elasticdl.job.spec import OPTION_GROUPS
from tests.documents.reading import ROOT

_GROUPS = {"train": OPTION_GROUPS, "run": SCRIPT_GROUPS}
# What is not this repository's, and is taken as it is.
_FOREIGN = {"docker", "buildah", "mmdebstrap", "kubectl", "apt-get", "sudo", "git", "source", "export", "cd", "kill"}


class Wrong(Exception):
    """A word that does not exist."""


class _Parsed(BaseException):
    """Takes the place of all that a program does once it has read its command line."""


def check_command(text: str) -> None:
    """
    Raises:
        Wrong: the command could not be run anywhere.
    """
    program, *words = itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(text))
    if program == "elasticdl":
        _check_elasticdl(words)
    elif program in ("python", "python3"):
        _check_python(words)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        _require("target of the Makefile", words[0], targets)
    elif program == "pip":
        _check_extras(words)
    elif "/" in program:
        if not (ROOT / program).is_file():
            raise Wrong(f"there is no {program}")
    else:
        _require("program", program, sorted(_FOREIGN))
    for path in re.findall(r"(?<!\S)(?:docker|benchmarks|scripts|docs)/\S+", text):
        if not (ROOT / path).exists():
            raise Wrong(f"there is no {path}")


def check_mention(text: str) -> None:
    """A command within a sentence, in which values may be left out or stand for others.

    Raises:
        Wrong: a command, a target or an option that does not exist.
    """
    program, *words = text.split()
    if program != "elasticdl":
        check_command(text)
        return
    words = words[: words.index("--")] if "--" in words else words
    name = next((word for word in words if word.islower() and not word.startswith("-")), "")
    if not name or name.startswith("elasticdl"):
        return
    _require("command", name, TABLE)
    known = options_of(name)
    for word in words:
        flag = f"--{underscored(word.partition('=')[0][2:])}"
        if word.startswith("--") and flag not in known:
            raise Wrong(f"`elasticdl {name}` has no option {flag}: {did_you_mean(flag, known)}")


def options_of(name: str) -> set[str]:
    """All options of a command of `elasticdl`."""
    context = click.Context(COMMANDS)
    found = COMMANDS.get_command(context, name)
    commands: list[click.Command | None] = [found]
    if isinstance(found, click.Group):
        commands = [found.get_command(context, each) for each in found.list_commands(context)]
    return {flag for command in commands if isinstance(command, Command) for flag in command.flags()}


def _read(group: click.Group, words: Sequence[str], parent: click.Context) -> click.Context:
    """What a command makes of its words, without doing anything."""
    name, *rest = words
    command = group.get_command(parent, name)
    assert command is not None
    if isinstance(command, click.Group):
        return _read(command, rest, click.Context(command, parent, name))
    with contextlib.redirect_stdout(None):
        return command.make_context(name, rest, parent=parent)


def _check_elasticdl(words: list[str]) -> None:
    _require("command", words[0], TABLE)
    try:
        context = _read(COMMANDS, words, click.Context(COMMANDS, info_name="elasticdl"))
        if words[0] in _GROUPS:
            make_spec(context.params, _GROUPS[words[0]], context.params.get("program", ()))
    except click.exceptions.Exit:  # it asked for help
        return
    except click.UsageError as error:
        raise Wrong(error.format_message()) from None
    except UserError as error:
        raise Wrong(str(error)) from None


def _check_python(words: list[str]) -> None:
    is_module = words[0] == "-m"
    name, *arguments = words[1:] if is_module else words
    if not is_module and not (ROOT / name).is_file():
        raise Wrong(f"there is no {name}")
    if not is_module and not arguments:
        return
    real = argparse.ArgumentParser.parse_args

    def read_and_stop(*given: Any, **named: Any) -> None:
        """Programs end where they have read their command line."""
        real(*given, **named)
        raise _Parsed

    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", read_and_stop),
        contextlib.suppress(_Parsed),
    ):
        try:
            run = runpy.run_module if is_module else runpy.run_path
            run(name if is_module else str(ROOT / name), run_name="__main__")
        except SystemExit as ended:
            raise Wrong(f"{name} does not take {' '.join(arguments)} ({ended})") from None
        except ImportError as error:
            raise Wrong(f"{name}: {error}") from None


def _check_extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if re.match(r"elasticdl\b(?!-)", word) and "--index-url" not in words:  # a site's own index may have it
            raise Wrong(f"{word} is another project's package on PyPI: `.` in a checkout, or a wheel's file")
        found = re.fullmatch(r"(?:\.|elasticdl|\S+\.whl)\[([\w,]+)\]", word)
        for extra in found[1].split(",") if found else ():
            _require("extra of pyproject.toml", extra, known)


def _require(kind: str, word: str, known: Any) -> None:
    if word not in known:
        raise Wrong(f"{word} is no {kind}: {did_you_mean(word, known) or ', '.join(known)}")


def check_names(code: str, names: dict[str, str]) -> None:
    """Import what ``code`` names of elasticdl; ``names`` says of which module or class a shorter name is.

    Raises:
        Wrong: there is no such name.
    """
    heads = "|".join(map(re.escape, ("elasticdl", *names)))
    for found in re.findall(rf"(?<![\w.\"'/])((?:{heads})(?:\.\w+)+)", code):
        head, *rest = found.split(".")
        target = [*names.get(head, head).split("."), *rest]
        if not target[-1].endswith(("py", "md")):
            resolve(target)


def resolve(path: Sequence[str]) -> Any:
    """
    Raises:
        Wrong: there is no such module, or no such name in it.
    """
    found: Any = importlib.import_module(path[0])
    for number, name in enumerate(path[1:], start=2):
        with contextlib.suppress(ImportError):
            importlib.import_module(".".join(path[:number]))
        try:
            found = getattr(found, name)
        except AttributeError:
            raise Wrong(f"there is no {'.'.join(path[:number])}") from None
        except UserError:  # it has a value only within a job
            return None
    return found


def check_call(code: str, names: dict[str, str]) -> None:
    """Whether one call of something of elasticdl's has arguments that are taken; anything else is passed over.

    Raises:
        Wrong: it has not.
    """
    try:
        call = ast.parse(code, mode="eval").body
    except SyntaxError:
        return
    if not isinstance(call, ast.Call) or "..." in code:
        return
    head, *rest = ast.unparse(call.func).split(".")
    if head not in ("elasticdl", *names):
        return
    called = resolve([*names.get(head, head).split("."), *rest])
    try:
        inspect.signature(called).bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})
    except TypeError as error:
        raise Wrong(f"{code}: {error}") from None
