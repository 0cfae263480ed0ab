"""Arguments given in one option, as in ``--model_params "units=64; activation='relu'"``."""

from __future__ import annotations

import ast

from elasticdl.common.errors import UserError

EXPECTED = "expected NAME=VALUE; NAME=VALUE with Python literals, as in \"units=64; activation='relu'\""


def parse_params(option: str, text: str) -> dict[str, object]:
    """The values by name; nothing in the text is evaluated, so only literals can be given.

    Raises:
        UserError: it is something else.
    """
    try:
        statements = ast.parse(text.strip().rstrip(";")).body
    except SyntaxError as error:
        raise UserError(f"--{option} {text!r} is not understood ({error.msg}); {EXPECTED}") from None
    params: dict[str, object] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                params[name] = _literal(option, name, value)
            case _:
                raise UserError(f"--{option}: {ast.unparse(statement)!r} is not understood; {EXPECTED}")
    return params


def _literal(option: str, name: str, value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise UserError(
            f"--{option}: {name}={ast.unparse(value)} is not a literal; put text in quotes, as in {name}='text'"
        ) from None
