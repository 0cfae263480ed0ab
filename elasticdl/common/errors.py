"""Errors, named by what the caller must do.

    ElasticDLError
    +-- UserError            fix the input; the command ends with 2 and nothing was started
    |   +-- ArgumentError    fix the call; a ValueError, too
    +-- JobFailedError       the job is over and did not succeed; the command ends with 1
    +-- ShortOfMemoryError   this worker is over; a machine with more memory may do what it could not
    +-- UnreachableError     the other side did not answer in time; try again or look after it
        +-- RefusedError     it refuses this caller: trying again does not help

What the elastic loop raises to change its course is in ``elasticdl.elastic.core.protocol``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class ElasticDLError(Exception):
    """Base of all errors of this package; its text is one line for a person."""


class UserError(ElasticDLError):
    """The input is wrong. The text says what, where, and what would be right."""


class ArgumentError(UserError, ValueError):
    """A function of the library was given a value that it cannot take; also the ValueError that callers expect."""


class JobFailedError(ElasticDLError):
    """The job ended without success."""


class ShortOfMemoryError(ElasticDLError):
    """This process has too little memory for what the job does, the user's code aside."""


class UnreachableError(ElasticDLError):
    """The master (or another service) did not answer within the deadline."""


class RefusedError(UnreachableError):
    """The master is there and refuses these credentials, now and later."""


class ReplacedError(OSError):
    """Another master has taken the job over: this one can't write its state any more."""


def first_finding(error: ValidationError) -> str:
    """Of what pydantic has found: where, unless it is about the whole, and what."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


# Extras of this package: packages that are installed only for those who ask for them.


def how_to_install(extra: str) -> str:
    """For messages. An index of packages is not named: what PyPI has under the name elasticdl is another project's."""
    return f"pip install '.[{extra}]' in a checkout of elasticdl, or its wheel with [{extra}] (docs/install.md)"


def import_extra(module: str, who: str, extra: str) -> Any:
    """A module of this package that needs packages of an extra; ``who`` needs the module.

    Raises:
        UserError: one of them is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "elasticdl":
            raise
        raise UserError(f"{who} need the package {missing}: {how_to_install(extra)}") from None
