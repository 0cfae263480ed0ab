"""Values of options that have a form of their own, as a command line or a YAML file has them."""

from __future__ import annotations

import ast
import re
from typing import Final

from elasticdl.common.errors import UserError

AUTO: Final = "auto"
CHECK_OFF, CHECK_REPAIR = "off", "repair"  # of --check_state
RANKS_ALL, RANKS_NONE = "all", "none"  # of --log_ranks
PARAMS = "expected NAME=VALUE; NAME=VALUE with Python literals, as in \"units=64; activation='relu'\""


def parse_limit(value: object) -> object:
    """Accept ``auto`` and a number of seconds, also as text."""
    if value == AUTO:
        return value
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is neither a number of seconds nor {AUTO}") from None
    if isinstance(value, bool) or not seconds > 0:
        raise ValueError(f"{value!r} must be above 0, or {AUTO}")
    return seconds


def parse_check(value: object) -> object:
    """Accept a number of steps and ``off`` as a YAML file has them."""
    text = CHECK_OFF if value is False else str(value)
    if not re.fullmatch("off|epoch|repair|[1-9][0-9]*", text):
        raise ValueError(f"{value!r} is neither off, epoch nor repair, nor a number of steps")
    return text


def parse_ranks(value: object) -> object:
    """Accept ``all``, ``none``, and one rank or several with commas between them; a YAML file may have a number or a list."""
    listed = value if isinstance(value, list) else [value]
    text = ",".join(str(each).replace(" ", "") for each in listed)
    if isinstance(value, bool) or not re.fullmatch(r"all|none|\d{1,5}(,\d{1,5})*", text):
        raise ValueError(f"{value!r} is neither all nor none, nor ranks as in 0,1")
    return text


def ranks_of(text: str) -> tuple[int, ...] | None:
    """The ranks that a value of --log_ranks names, each once; None for all."""
    if text == RANKS_ALL:
        return None
    return () if text == RANKS_NONE else tuple(dict.fromkeys(map(int, text.split(","))))


def parse_params(option: str, text: str) -> dict[str, object]:
    """Arguments given in one option, by name, as in ``--model_params "units=64; activation='relu'"``.

    Nothing in the text is evaluated, so only literals can be given.

    Raises:
        UserError: it is something else.
    """
    try:
        statements = ast.parse(text.strip().rstrip(";")).body
    except SyntaxError as error:
        raise UserError(f"--{option} {text!r} is not understood ({error.msg}); {PARAMS}") from None
    params: dict[str, object] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                params[name] = _literal(option, name, value)
            case _:
                raise UserError(f"--{option}: {ast.unparse(statement)!r} is not understood; {PARAMS}")
    return params


def _literal(option: str, name: str, value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise UserError(
            f"--{option}: {name}={ast.unparse(value)} is not a literal; put text in quotes, as in {name}='text'"
        ) from None
