"""Command-line flags and YAML keys, both made from the fields of the job specification.

Values travel as text to pydantic, which converts and checks them; this module only says what was given where,
and turns pydantic's findings into one line.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elasticdl.cli.parsing import Option, did_you_mean
from elasticdl.common.errors import UserError
from elasticdl.common.reason import flat
from elasticdl.job.spec import JobSpec, WorkerRange, fields_of

Groups = Iterable[type[BaseModel]]
# Findings of pydantic that say less than the description of the option.
_UNTELLING = ("model_type", "string_pattern_mismatch")


def spec_options(groups: Groups) -> list[Option]:
    """``--config`` and one option per field, in one section per group."""
    made = [Option(["--config"], metavar="FILE", help="YAML file with the same options; the command line overrides")]
    for group in groups:
        section = str(group.__doc__)
        for name, field in fields_of(group).items():
            if field.annotation is bool:
                made.append(Option([f"--{name}/--no_{name}"], section, default=None, help=_help(field)))
            else:
                made.append(Option([f"--{name}"], section, metavar=_metavar(field), help=_help(field)))
    return made


def _help(field: Any) -> str:
    default = {True: "yes", False: "no"}[field.default] if field.annotation is bool else field.default
    return str(field.description) if default in (None, "") else f"{field.description} (default: {default})"


def _metavar(field: Any) -> str:
    if any(getattr(rule, "le", None) == 1 for rule in field.metadata):
        return "PART"
    names = {int: "N", float: "SECONDS", WorkerRange: "N|MIN-MAX", str: "TEXT"}
    kinds = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    return "|".join(
        names.get(getattr(kind, "__origin__", kind)) or "|".join(typing.get_args(kind) or (kind,)) for kind in kinds
    )


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
    known = [name for group in groups for name in fields_of(group)]
    flags = {name: params[name] for name in known if params.get(name) is not None}
    file = params.get("config")
    config = {} if file is None else _read_config(Path(str(file)), known)
    places = {name: f"{file}: {name}: {value}" for name, value in config.items()}
    return Given({**config, **flags}, {**places, **{name: f"--{name} {value}" for name, value in flags.items()}})


def _read_config(path: Path, known: Sequence[str]) -> dict[str, object]:
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
    return content


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
        return _wanted("", first)
    name = str(first["loc"][0])
    # Of an option of several types there is one for each.
    wanted = " or ".join(dict.fromkeys(_wanted(name, each) for each in findings if each["loc"][:1] == (name,)))
    value = given.values.get(name)
    return f"{given.places[name]}: {wanted.removeprefix(f'{value}: ').removeprefix(f'{value!r} ')}"


def _wanted(name: str, found: ErrorDetails) -> str:
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    if found["type"] in _UNTELLING:
        return f"does not fit: {JobSpec.model_fields[name].description}"
    return found["msg"].partition(", unable to")[0].replace("Input should be", "must be")
