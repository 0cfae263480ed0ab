"""``elasticdl train`` and ``elasticdl run``: start a job, on this machine or, with an image, on a cluster.

The options, and the keys of a ``--config`` file, are the fields of the job's specification. Their values travel as text to pydantic, which
converts and checks them; here is only said what was given where, and pydantic's findings become one line.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import click
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from elasticdl.cli.folder_run import run_here, run_on_slurm
from elasticdl.cli.parsing import Command, Option, command, did_you_mean
from elasticdl.common.errors import UserError, import_extra
from elasticdl.common.reason import flat
from elasticdl.job.spec import (
    EVALUATE,
    OPTION_GROUPS,
    PREDICT,
    TRAIN,
    JobOptions,
    JobSpec,
    KubernetesOptions,
    OutputOptions,
    ResumeOptions,
    SlurmOptions,
    TimingOptions,
    WorkerRange,
    options_of,
)

EXAMPLE = "elasticdl train --model_zoo model_zoo --model_def digits.cnn_torch --num_workers 2-4 --global_batch_size 256"
TRAINED = (
    "elasticdl {} --model_zoo model_zoo --model_def digits.cnn_torch --num_workers 2-4 --checkpoint_dir checkpoints"
)
# The model, the data, the batch, the evaluations and when checkpoints are written are the script's own business.
SCRIPT_GROUPS: tuple[type[BaseModel], ...] = (
    JobOptions,
    ResumeOptions,
    OutputOptions,
    TimingOptions,
    KubernetesOptions,
    SlurmOptions,
)
OF_MODULES = (
    "`elasticdl train` has it; with `elasticdl run` that is the script's own business, so put it into the script"
)
# Programs, and modules for `python -m`, that start workers of their own, which can't come and go.
STARTERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "horovodrun", "mpirun", "mpiexec", "deepspeed", "accelerate",
)  # fmt: skip
Groups = Iterable[type[BaseModel]]
# Findings of pydantic that say less than the description of the option.
_UNTELLING = ("model_type", "string_pattern_mismatch")


def _options(groups: Groups, task: str = TRAIN) -> list[Option]:
    """``--config`` and one option per field, in one section per group; and what is asked of a submission."""
    made = [Option(["--config"], metavar="FILE", help="YAML file with the same options; the command line overrides")]
    for group in groups:
        section = str(group.__doc__)
        for name, field in options_of(group, task).items():
            if field.annotation is bool:
                made.append(Option([f"--{name}/--no_{name}"], section, default=None, help=_help(field)))
            else:
                made.append(Option([f"--{name}"], section, metavar=_metavar(field), help=_help(field)))
    section = "Submission to Kubernetes"
    to_file = "write the job's objects to this file instead of submitting them; it holds the job's secret keys"
    dry_run = "ask the cluster whether it would take the job, and print its objects; nothing is made"
    return [
        *made,
        Option(["--yaml"], section, default="", metavar="FILE", help=to_file),
        Option(["--dry_run"], section, is_flag=True, help=dry_run),
        Option(["--detach"], section, is_flag=True, help="do not follow the job once it is submitted"),
    ]


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


def make_spec(
    params: Mapping[str, object], groups: Groups, command: tuple[str, ...] = (), task: str = TRAIN
) -> JobSpec:
    """What the command line and its ``--config`` file say, converted and checked.

    Raises:
        UserError: the file can't be read, is no mapping, or has a key that is no option; or one line about the first option that is wrong.
    """
    known = [name for group in groups for name in options_of(group, task)]
    flags = {name: params[name] for name in known if params.get(name) is not None}
    file = params.get("config")
    config = {} if file is None else _read_config(Path(str(file)), known)
    values = {**config, **flags}
    try:
        return JobSpec.model_validate({**values, "command": command, "task": task})
    except ValidationError as error:
        places = {name: f"{file}: {name}: {value}" for name, value in config.items()}
        places |= {name: f"--{name} {value}" for name, value in flags.items()}
        raise UserError(_explain(error.errors(), values, places)) from None


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


def _explain(findings: Sequence[ErrorDetails], values: Mapping[str, object], places: Mapping[str, str]) -> str:
    """One line from the first of pydantic's findings: the option as it was written (``places``), and what would be right."""
    first = findings[0]
    if not first["loc"]:  # about several options at once; the text names them
        return _wanted("", first)
    name = str(first["loc"][0])
    # Of an option of several types there is one for each.
    wanted = " or ".join(dict.fromkeys(_wanted(name, each) for each in findings if each["loc"][:1] == (name,)))
    value = values.get(name)
    return f"{places[name]}: {wanted.removeprefix(f'{value}: ').removeprefix(f'{value!r} ')}"


def _wanted(name: str, found: ErrorDetails) -> str:
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    if found["type"] in _UNTELLING:
        return f"does not fit: {JobSpec.model_fields[name].description}"
    return found["msg"].partition(", unable to")[0].replace("Input should be", "must be")


class _ScriptCommand(Command):
    """What follows ``--`` is the user's program, handed over as it was typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in train.flags():
                raise UserError(f"{error.option_name}: {OF_MODULES}") from None
            raise
        program = ctx.params["program"]
        before = words[: len(words) - len(program)]
        if program and before[-1:] != ["--"] and not ctx.resilient_parsing:
            python = ["python"] if program[0].endswith(".py") else []
            right = " ".join(["elasticdl run", *before, "--", *python, *program])
            raise UserError(f"the program goes after --: `{right}`")
        return rest


def _of_modules(task: str, does: str, example: str) -> Callable[..., Any]:
    """A command for a model-zoo module."""
    return command(
        *_options(OPTION_GROUPS, task),
        options_metavar="--model_def MODULE[.FUNCTION] [OPTIONS]",
        help=f"{does}, on this machine, a Kubernetes cluster or Slurm, on workers that may come and go. As in: {example}",
    )


def _run_module(task: str, given: Mapping[str, object]) -> int:
    spec = make_spec(given, OPTION_GROUPS, task=task)
    if not spec.model_def:
        raise UserError("--model_def is missing: name a module below --model_zoo, as in --model_def digits.cnn_torch")
    return _run_anywhere(spec, given)


@_of_modules(TRAIN, "Train a model-zoo module", f"{EXAMPLE}. A script of your own is for `elasticdl run`.")
def train(**given: object) -> int:
    return _run_module(TRAIN, given)


@_of_modules(EVALUATE, "Compute the metrics of a trained model-zoo module", f"{TRAINED.format('evaluate')}.")
def evaluate(**given: object) -> int:
    return _run_module(EVALUATE, given)


@_of_modules(
    PREDICT,
    "Predict with a trained model-zoo module",
    f"{TRAINED.format('predict')} --prediction_data new.csv --output predictions.npz.",
)
def predict(**given: object) -> int:
    return _run_module(PREDICT, given)


@command(
    click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENTS]"),
    *_options(SCRIPT_GROUPS),
    kind=_ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    help="Run a training script, on this machine, a Kubernetes cluster or Slurm, on workers that may come and go. It uses "
    "elasticdl.elastic (a plain loop with prepare(), the library's loop, Lightning, Hugging Face's Trainer, Keras's fit, or what Run:AI's "
    "library has), or was written for Horovod's elastic mode, which needs no change.",
)
def run(program: Sequence[str], **given: object) -> int:
    if not program:
        raise UserError("the program is missing: put it after --, as in `elasticdl run -- python train.py`")
    _refuse_starters(program)
    return _run_anywhere(make_spec(given, SCRIPT_GROUPS, tuple(program)), given)


def _refuse_starters(program: Sequence[str]) -> None:
    """
    Raises:
        UserError: the program starts workers itself.
    """
    words = [PurePath(word).name for word in program]
    named = words[2] if words[1:2] == ["-m"] and len(words) > 2 else words[0]
    if named in STARTERS:
        raise UserError(
            f"{named} starts workers of its own, which can't come and go: give the script alone, as in `elasticdl run -- python "
            "train.py`, and see docs/migration.md for what changes in it"
        )


def _run_anywhere(spec: JobSpec, given: Mapping[str, object]) -> int:
    """Returns the exit code.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
    """
    if spec.image:
        code: int = import_extra("elasticdl.cli.cluster_run", "jobs on a cluster", "kubernetes").run_job(
            spec, yaml=given["yaml"], dry_run=given["dry_run"], detach=given["detach"]
        )
        return code
    for name in ("yaml", "dry_run", *(() if spec.launcher else ("detach",))):
        if given[name]:
            raise UserError(f"--{name} is for a job on a Kubernetes cluster: give --image as well, or leave it out")
    if spec.launcher:
        return run_on_slurm(spec, detach=bool(given["detach"]))
    return run_here(spec)
