"""Command-line flags and YAML keys, both made from the fields of the job specification.

Values travel as text to pydantic, which converts and checks them; this module only says what was given where,
and turns pydantic's findings into one line.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elasticdl.cli.former import option_instead
from elasticdl.cli.nearest import did_you_mean
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import UserError
from elasticdl.common.option_group import aliases_of, fields_of
from elasticdl.common.spec import JobSpec, WorkerRange

Groups = Iterable[type[BaseModel]]


def add_options(parser: Parser, groups: Groups) -> None:
    """Add ``--config`` and one flag per field, in one argument group per option group.

    What is not on the command line is not in the namespace either.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options; the command line overrides")
    for group in groups:
        section = parser.add_argument_group(group.__doc__)
        for name, field in fields_of(group).items():
            flag, text = f"--{name}", _help(name, field).replace("%", "%%")
            if field.annotation is bool:
                section.add_argument(flag, nargs="?", const="true", default=None, metavar="true|false", help=text)
                section.add_argument(
                    f"--no_{name}", dest=name, action="store_const", const="false", help=argparse.SUPPRESS
                )
            else:
                flags = (flag, *(f"--{alias}" for alias in aliases_of(field)))
                section.add_argument(*flags, metavar=_metavar(field.annotation), help=text)


def _help(name: str, field: Any) -> str:
    if field.annotation is bool:
        return f"{field.description} (default: {'yes' if field.default else 'no'}; --no_{name}: no)"
    shown = field.default is not None and field.default != ""
    return f"{field.description} (default: {field.default})" if shown else str(field.description)


def _metavar(annotation: Any) -> str:
    kinds = (annotation,) if typing.get_origin(annotation) is Literal else typing.get_args(annotation) or (annotation,)
    if typing.get_origin(kinds[0]) is Literal:
        return "|".join(typing.get_args(kinds[0]))
    names = {int: "N", float: "SECONDS", WorkerRange: "N|MIN-MAX"}
    return next((names[kind] for kind in kinds if kind in names), "TEXT")


@dataclass(frozen=True, slots=True)
class Given:
    """The options somebody gave, by name, and where."""

    flags: Mapping[str, object]
    config: Mapping[str, object]
    config_file: str = ""

    def merged(self) -> dict[str, object]:
        return {**self.config, **self.flags}

    def place(self, name: str) -> str:
        """How the person wrote it, for the start of a message."""
        if name in self.flags:
            return f"--{name} {self.flags[name]}"
        return f"{self.config_file}: {name}: {self.config.get(name)}"


def read_options(namespace: Mapping[str, object], groups: Groups) -> Given:
    """What the command line and its ``--config`` file say.

    Raises:
        UserError: the file can't be read, is no mapping, or has a key that is no option.
    """
    fields = {name: field for group in groups for name, field in fields_of(group).items()}
    known = {alias: name for name, field in fields.items() for alias in (name, *aliases_of(field))}
    flags = {name: namespace[name] for name in fields if namespace.get(name) is not None}
    config_file = namespace.get("config")
    if config_file is None:
        return Given(flags, {})
    return Given(flags, _read_config(Path(str(config_file)), known), str(config_file))


def _read_config(path: Path, known: Mapping[str, str]) -> dict[str, object]:
    """``known``: options by the names that people may give them."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must be a mapping of options, as in `num_workers: 2-4`")
    for key in content:
        if key not in known:
            near = option_instead(str(key)) or did_you_mean(str(key), known)
            raise UserError(f"{path}: unknown option {key}: {'remove it' if near.startswith('there are') else near}")
    return {known[key]: value for key, value in content.items()}


def make_spec(given: Given, command: tuple[str, ...] = ()) -> JobSpec:
    """Convert and check everything.

    Raises:
        UserError: one line about the first option that is wrong.
    """
    try:
        return JobSpec.model_validate({**given.merged(), "command": command})
    except ValidationError as error:
        raise UserError(explain(error.errors()[0], given)) from None


def explain(finding: ErrorDetails, given: Given) -> str:
    """One line from one of pydantic's findings: the option, its value, and what would be right."""
    if not finding["loc"]:  # about several options at once; the text names them
        return str(finding["ctx"]["error"])
    name = str(finding["loc"][0])
    value, wanted = given.merged().get(name), _wanted(finding, JobSpec.model_fields[name].description)
    return f"{given.place(name)}: {wanted.removeprefix(f'{value}: ').removeprefix(f'{value!r} ')}"


def _wanted(finding: ErrorDetails, description: str | None) -> str:
    limits = finding.get("ctx", {})
    match finding["type"].split("_")[0], finding["type"]:
        case _, "value_error":
            return str(limits["error"])
        case _, "greater_than_equal":
            return f"must be at least {limits['ge']:g}"
        case _, "greater_than":
            return f"must be above {limits['gt']:g}"
        case _, "less_than_equal":
            return f"must be at most {limits['le']:g}"
        case _, "literal_error":
            return f"must be one of {limits['expected']}"
        case "int", _:
            return "must be a whole number"
        case "float", _:
            return "must be a number"
        case "bool", _:
            return "must be true or false"
        case _:
            return f"does not fit: {description}"
