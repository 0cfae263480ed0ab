"""Commands, their options and their help, on click.

``--num-workers`` is taken for ``--num_workers``. Options stand in sections. Commands are imported when they are asked for.
"""

from __future__ import annotations

import difflib
import importlib
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

import elasticdl
from elasticdl.common.front_ends import FRONT_ENDS


def version_text() -> str:
    """Two lines, as for a report of a fault. The packages' metadata say it: importing the frameworks would take seconds."""
    names = ["horovod", *(name for each in FRONT_ENDS for names in each.packages for name in names)]
    found = [f"{name} {version}" for name in names if (version := _installed(name))]
    return (
        f"elasticdl {elasticdl.__version__}, Python {platform.python_version()}\n"
        f"collectives and frameworks: {', '.join(found) or 'none'}"
    )


def _installed(package: str) -> str:
    from importlib import metadata  # which would take a third of the time that a command's help takes

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# Names for jobs that nobody has named: easy to say, to type and to tell from another.


ADJECTIVES = (
    "amber", "bold", "brave", "bright", "brisk", "calm", "clever", "cosy", "eager", "fair", "gentle", "golden",
    "happy", "keen", "kind", "lively", "lucky", "mellow", "merry", "mighty", "nimble", "noble", "patient", "proud",
    "quick", "quiet", "silver", "steady", "sunny", "swift", "tidy", "warm", "wise", "witty", "young", "zesty",
)  # fmt: skip
ANIMALS = (
    "badger", "bear", "beaver", "bison", "crane", "deer", "dolphin", "eagle", "falcon", "ferret", "finch", "fox",
    "gecko", "hare", "hawk", "heron", "ibex", "koala", "lark", "lemur", "lion", "lynx", "marten", "moose",
    "newt", "otter", "owl", "panda", "puffin", "raven", "robin", "seal", "stoat", "swan", "tiger", "wren",
)  # fmt: skip


def made_up_name(is_taken: Callable[[str], bool]) -> str:
    """As ``brave-otter-42``."""
    rng = random.SystemRandom()
    while is_taken(name := f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{rng.randrange(10, 100)}"):
        pass
    return name


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """``did you mean X?``; empty when nothing is near."""
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def underscored(name: str) -> str:
    """The spelling of an option that the commands know."""
    return name.replace("-", "_")


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "token_normalize_func": underscored}


class Option(click.Option):
    """``section``: the title above it in the help."""

    def __init__(self, declarations: Sequence[str], section: str = "Options", **settings: Any) -> None:
        super().__init__(declarations, **settings)
        self.section = section

    def flags(self) -> list[str]:
        return [*self.opts, *self.secondary_opts]


class Command(click.Command):
    """A command whose help has its options in sections."""

    def flags(self) -> list[str]:
        return ["--help", *(flag for each in self.params if isinstance(each, Option) for flag in each.flags())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in (*self.get_params(ctx)[-1:], *self.params):  # the first is --help
            record = each.get_help_record(ctx)
            if record is not None and not isinstance(each, click.Argument):
                sections.setdefault(getattr(each, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def command(
    *params: click.Parameter, help: str, kind: type[Command] = Command, **settings: Any
) -> Callable[[Callable[..., int]], Command]:
    """Makes a function, which takes the parameters' values and returns the exit code, the command of its name."""
    more = {**CONTEXT, **settings.pop("context_settings", {})}
    return lambda function: kind(
        function.__name__, params=list(params), callback=function, help=help, context_settings=more, **settings
    )


class Commands(click.Group):
    """Commands that are imported when they are asked for; ``table``: by name the module and what the command does."""

    def __init__(self, name: str, table: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(name, context_settings=CONTEXT, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """
        Raises:
            NoSuchCommand: there is none of that name.
        """
        if cmd_name not in self._table:
            raise click.NoSuchCommand(cmd_name, possibilities=self._table, ctx=ctx)
        found: click.Command = getattr(importlib.import_module(self._table[cmd_name][0]), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
