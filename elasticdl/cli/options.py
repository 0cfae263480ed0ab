"""Command-line flags and YAML keys, both made from the fields of the job specification.

Values travel as text to pydantic, which converts and checks them; this module only says what was given where,
and turns pydantic's findings into one line.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elasticdl.cli.parsing import Option, Switch, did_you_mean
from elasticdl.common.errors import UserError
from elasticdl.common.reason import flat
from elasticdl.job.spec import JobSpec, WorkerRange, aliases_of, fields_of

Groups = Iterable[type[BaseModel]]
# Findings of pydantic that say less than the description of the option.
_UNTELLING = ("model_type", "string_pattern_mismatch")
_PLAIN_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def spec_options(groups: Groups) -> list[Option]:
    """``--config`` and one option per field, in one section per group."""
    made = [
        Option(["--config"], metavar="FILE", help="YAML file with the same options; the command line overrides"),
    ]
    for group in groups:
        section = str(group.__doc__)
        for name, field in fields_of(group).items():
            text, flags = _help(name, field), [f"--{name}", *(f"--{alias}" for alias in aliases_of(field))]
            if field.annotation is bool:
                made.append(Switch(name, section, text))
            else:
                made.append(Option([*flags, name], section, metavar=_metavar(field), help=text))
    return made


def _help(name: str, field: Any) -> str:
    if field.annotation is bool:
        return f"{field.description} (default: {'yes' if field.default else 'no'}; --no_{name}: no)"
    shown = field.default is not None and field.default != ""
    return f"{field.description} (default: {field.default})" if shown else str(field.description)


def _metavar(field: Any) -> str:
    if any(getattr(rule, "le", None) == 1 for rule in field.metadata):
        return "PART"
    names = {int: "N", float: "SECONDS", WorkerRange: "N|MIN-MAX", str: "TEXT"}
    is_union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    kinds = (
        [kind for kind in typing.get_args(field.annotation) if kind is not type(None)]
        if is_union
        else [field.annotation]
    )
    return "|".join(names.get(getattr(kind, "__origin__", kind)) or "|".join(typing.get_args(kind)) for kind in kinds)


@dataclass(frozen=True, slots=True)
class Given:
    """The options somebody gave, by name, and how they wrote each, for the start of a message."""

    values: Mapping[str, object]
    places: Mapping[str, str]


def read_options(params: Mapping[str, object], groups: Groups) -> Given:
    """What the command line and its ``--config`` file say.

    Raises:
        UserError: the file can't be read, is no mapping, or has a key that is no option.
    """
    fields = {name: field for group in groups for name, field in fields_of(group).items()}
    known = {alias: name for name, field in fields.items() for alias in (name, *aliases_of(field))}
    flags = {name: params[name] for name in fields if params.get(name) is not None}
    file = params.get("config")
    config = {} if file is None else _read_config(Path(str(file)), known)
    places = {name: f"{file}: {name}: {value}" for name, value in config.items()}
    return Given({**config, **flags}, {**places, **{name: f"--{name} {value}" for name, value in flags.items()}})


def _read_config(path: Path, known: Mapping[str, str]) -> dict[str, object]:
    """``known``: options by the names that people may give them."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {flat(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must be a mapping of options, as in `num_workers: 2-4`")
    for key in content:
        if key not in known:
            raise UserError(f"{path}: unknown option {key}: {did_you_mean(str(key), known) or 'remove it'}")
    return {known[key]: value for key, value in content.items()}


def make_spec(given: Given, command: tuple[str, ...] = ()) -> JobSpec:
    """Convert and check everything.

    Raises:
        UserError: one line about the first option that is wrong.
    """
    try:
        return JobSpec.model_validate({**given.values, "command": command})
    except ValidationError as error:
        raise UserError(_explain(error.errors(), given)) from None


def _explain(findings: Sequence[ErrorDetails], given: Given) -> str:
    """One line from the first of pydantic's findings: the option, its value, and what would be right."""
    first = findings[0]
    if not first["loc"]:  # about several options at once; the text names them
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    value = given.values.get(name)
    wanted = dict.fromkeys(
        _wanted(name, each) for each in findings if each["loc"][:1] == (name,)
    )  # of each of its types
    return f"{given.places[name]}: {' or '.join(wanted).removeprefix(f'{value}: ').removeprefix(f'{value!r} ')}"


def _wanted(name: str, finding: ErrorDetails) -> str:
    if finding["type"] == "value_error":
        return str(finding["ctx"]["error"])
    if finding["type"] in _UNTELLING:
        return f"does not fit: {JobSpec.model_fields[name].description}"
    wanted = finding["msg"].partition(", unable to")[0]
    for said, plain in _PLAIN_WORDS.items():
        wanted = wanted.replace(said, plain)
    return wanted
