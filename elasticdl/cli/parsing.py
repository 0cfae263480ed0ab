"""Commands, their options and their help, on click.

``--num-workers`` is taken for ``--num_workers``. Options stand in sections. A mistake is a UserError of one line, with the
nearest match, instead of a usage text.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from elasticdl.cli.retired_options import instead_of
from elasticdl.common.errors import UserError

SEPARATOR = "--"


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """``did you mean X?``; empty when nothing is near."""
    near = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def underscored(token: str) -> str:
    """The spelling of an option that the commands know; other arguments are left alone."""
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class Option(click.Option):
    """An option whose value travels as text; ``section`` is the title above it in the help."""

    def __init__(self, declarations: Sequence[str], section: str = "Options", **settings: Any) -> None:
        super().__init__(declarations, **settings)
        self.section = section
        self.needs_value = not (self.is_flag or settings.get("flag_value"))


class Switch(Option):
    """As in ``--shuffle``, ``--shuffle=no`` and ``--no_shuffle``."""

    def __init__(self, name: str, section: str, text: str) -> None:
        super().__init__([f"--{name}"], section, is_flag=False, flag_value="true", metavar="[true|false]", help=text)
        self.opposite = f"--no_{name}"


class Command(click.Command):
    """A command whose words are options and arguments."""

    def __init__(self, name: str, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "allow_extra_args": True, "max_content_width": 100}
        super().__init__(name, context_settings=context, **settings)

    def flags(self) -> list[str]:
        found = ["--help"]
        for each in self.params:
            found += each.opts if isinstance(each, Option) else []
            found += [each.opposite] if isinstance(each, Switch) else []
        return found

    def needy_flags(self) -> set[str]:
        """Those that a value follows."""
        return {flag for each in self.params if isinstance(each, Option) and each.needs_value for flag in each.opts}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        Raises:
            UserError: an unknown option, a missing or a superfluous argument.
        """
        opposites = {each.opposite: f"{each.opts[0]}=false" for each in self.params if isinstance(each, Switch)}
        words = [opposites.get(word, word) for word in map(underscored, args)]
        self._require_values(ctx, words, args)
        try:
            rest = super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            raise UserError(f"unknown option {error.option_name}: {self._instead(ctx, error.option_name)}") from None
        except click.UsageError as error:
            raise UserError(f"{_finding(error, ctx)}; {_see(ctx)}") from None
        if ctx.args:
            raise UserError(self.superfluous(ctx, ctx.args[0]))
        return rest

    def superfluous(self, ctx: click.Context, word: str) -> str:
        """What is said of a word that no option and no argument takes."""
        return f"{word!r} is one argument too many; {_see(ctx)}"

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, " ".join(self.collect_usage_pieces(ctx)), prefix="usage: ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in (*self.get_params(ctx)[-1:], *self.params):  # the first is --help
            record = each.get_help_record(ctx)
            if record is not None and not isinstance(each, click.Argument):
                sections.setdefault(getattr(each, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def _require_values(self, ctx: click.Context, words: Sequence[str], given: Sequence[str]) -> None:
        """What begins as an option is no value of another: click itself would take it for one."""
        needy = self.needy_flags()
        for word, (following, as_given) in zip(words, zip(words[1:], given[1:], strict=True), strict=False):
            if word in needy and following.startswith("--"):
                is_value = following.partition("=")[0] not in self.flags()  # as another program's options
                hint = f": did you mean {word}='{as_given}'?" if is_value else f"; {_see(ctx)}"
                raise UserError(f"{word}: expected one argument{hint}")

    def _instead(self, ctx: click.Context, flag: str) -> str:
        near = instead_of(flag.removeprefix("--")) or did_you_mean(flag, self.flags())
        return near or f"`{ctx.command_path} --help` lists the options"


def command(
    *params: click.Parameter, help: str, kind: type[Command] = Command, **settings: Any
) -> Callable[[Callable[..., int]], Command]:
    """Makes a function, which takes the parameters' values and returns the exit code, the command of its name."""
    return lambda function: kind(function.__name__, params=list(params), callback=function, help=help, **settings)


class Commands(click.Group):
    """Commands that are imported when they are asked for; ``table``: by name the module and what the command does."""

    def __init__(self, name: str, table: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(name, context_settings={"help_option_names": ["-h", "--help"]}, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """
        Raises:
            UserError: there is none of that name.
        """
        if cmd_name not in self._table:
            near = instead_of(cmd_name) or did_you_mean(cmd_name, self._table)
            raise UserError(f"unknown command {cmd_name}: {near or 'there are ' + ', '.join(self._table)}")
        found: click.Command = getattr(importlib.import_module(self._table[cmd_name][0]), cmd_name)
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a command, and for ``help``, the commands are shown."""
        if not ctx.resilient_parsing and (not args or args[0] == "help"):
            click.echo(self.get_help(ctx))
            ctx.exit(0 if args else 2)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise UserError(f"unknown option {error.option_name}; {_see(ctx)}") from None

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS]", prefix="usage: ")
        width = max(8, *(len(name) + 1 for name in self._table))
        commands = "".join(f"  {name:{width}}{text}\n" for name, (_, text) in self._table.items())
        options = "".join(f"; `{ctx.command_path} {each.opts[0]}`: {each.help}" for each in self.params)
        formatter.write(f"\n{commands}\n`{ctx.command_path} COMMAND --help` shows the options of a command{options}.\n")


def _finding(error: click.UsageError, ctx: click.Context) -> str:
    match error:
        case click.MissingParameter(param=click.Parameter() as param):
            name = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
            return f"the following arguments are required: {name}"
        case click.BadOptionUsage():
            return (
                f"{error.option_name}: {'expected one argument' if 'requires' in error.message else 'takes no value'}"
            )
        case click.BadParameter(param=click.Parameter() as param):
            return f"{param.opts[0]}: {error.message.rstrip('.')}"
        case _:
            return error.format_message().rstrip(".")


def _see(ctx: click.Context) -> str:
    return f"see `{ctx.command_path} --help`"
