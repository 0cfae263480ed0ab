"""argparse with this project's manners: no abbreviations, ``--num-workers`` taken for ``--num_workers``, and
every mistake a UserError with the nearest match instead of a usage text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from elasticdl.cli.former import option_instead
from elasticdl.cli.nearest import did_you_mean
from elasticdl.common.errors import UserError


def underscored(token: str) -> str:
    """The spelling of an option that the parsers know; other arguments are left alone."""
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class Parser(argparse.ArgumentParser):
    """The parser of one command."""

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog=f"elasticdl {command}", usage=usage, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command's arguments.

        Raises:
            UserError: an unknown option, a missing or a superfluous argument.
        """
        namespace, unknown = self.parse_known_args([underscored(token) for token in argv])
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("-"):
                raise UserError(f"{flag!r} is one argument too many; see `{self.prog} --help`")
            raise UserError(f"unknown option {flag}: {self._suggestion(flag)}")
        return namespace

    def _suggestion(self, flag: str) -> str:
        if instead := option_instead(flag.removeprefix("--")):
            return instead
        text = did_you_mean(flag, self.flags())
        return text if text.endswith("?") else f"`{self.prog} --help` lists the options"
