"""``elasticdl train`` and ``elasticdl run``: start a job, on this machine or, with an image, on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

import click
from pydantic import BaseModel

from elasticdl.cli import slurm_run
from elasticdl.cli.local_run import run_job
from elasticdl.cli.options import make_spec, read_options, spec_options
from elasticdl.cli.parsing import Command, Option, command
from elasticdl.common.errors import UserError, import_extra
from elasticdl.job.spec import (
    OPTION_GROUPS,
    JobOptions,
    JobSpec,
    KubernetesOptions,
    OutputOptions,
    ResumeOptions,
    SlurmOptions,
    TimingOptions,
)

EXAMPLE = "elasticdl train --model_zoo model_zoo --model_def digits.cnn_torch --num_workers 2-4 --global_batch_size 256"
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


def _options(groups: tuple[type[BaseModel], ...]) -> list[Option]:
    section = "Submission to Kubernetes"
    yaml = "write the job's objects to this file instead of submitting them; it holds the job's secret keys"
    dry_run = "ask the cluster whether it would take the job, and print its objects; nothing is made"
    return [
        *spec_options(groups),
        Option(["--yaml"], section, default="", metavar="FILE", help=yaml),
        Option(["--dry_run"], section, is_flag=True, help=dry_run),
        Option(["--detach"], section, is_flag=True, help="do not follow the job once it is submitted"),
    ]


@command(
    *_options(OPTION_GROUPS),
    options_metavar="--model_def MODULE[.FUNCTION] [OPTIONS]",
    help="Train a model-zoo module, on this machine, a Kubernetes cluster or Slurm, on workers that may come and go. "
    f"As in: {EXAMPLE}. A script of your own is for `elasticdl run`.",
)
def train(**given: object) -> int:
    spec = make_spec(read_options(given, OPTION_GROUPS))
    if not spec.model_def:
        raise UserError("--model_def is missing: name a module below --model_zoo, as in --model_def digits.cnn_torch")
    return _run_anywhere(spec, given)


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
    read = read_options(given, SCRIPT_GROUPS)
    if not program:
        raise UserError("the program is missing: put it after --, as in `elasticdl run -- python train.py`")
    _refuse_starters(program)
    return _run_anywhere(make_spec(read, tuple(program)), given)


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
        return slurm_run.run_job(spec, detach=bool(given["detach"]))
    return run_job(spec)
