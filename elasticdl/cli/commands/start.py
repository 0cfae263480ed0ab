"""``elasticdl train`` and ``elasticdl run``: start a job, on this machine or, with an image, on a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import click
from pydantic import BaseModel

from elasticdl.cli.commands.find_job import cluster_module
from elasticdl.cli.local import slurm_run
from elasticdl.cli.local.local_run import run_job
from elasticdl.cli.options import make_spec, read_options, spec_options
from elasticdl.cli.parsing import SEPARATOR, Command, Option, command, underscored
from elasticdl.cli.retired_options import refuse_starters
from elasticdl.common.errors import UserError
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
_ANSWERS = ("true", "false", "yes", "no", "on", "off", "1", "0")  # to a switch


class _ModuleCommand(Command):
    def superfluous(self, ctx: click.Context, word: str) -> str:
        if word.endswith(".py") or os.path.basename(word).startswith("python"):
            return f"{word!r} is no option of a module: for a script of your own it is `elasticdl run [OPTIONS] -- python train.py`"
        return super().superfluous(ctx, word)


class _ScriptCommand(Command):
    """What follows ``--`` is the user's program, handed over as it was typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index(SEPARATOR) if SEPARATOR in args else len(args)
        if split == len(args):
            self._require_separator(args)
        rest = super().parse_args(ctx, args[:split])
        ctx.params["program"] = tuple(args[split + 1 :])
        return rest

    def _instead(self, ctx: click.Context, flag: str) -> str:
        return OF_MODULES if flag in train.flags() else super()._instead(ctx, flag)

    def _require_separator(self, args: list[str]) -> None:
        """The first word that is neither an option nor the value of one begins the program."""
        known, needy, before = self.flags(), self.needy_flags(), ""
        for number, word in enumerate(args):
            is_value = before in needy or (before in known and word in _ANSWERS)
            before = underscored(word)
            if word.startswith("-") and not is_value and before.partition("=")[0] not in known:
                return  # it is told as an unknown option
            if not word.startswith("-") and not is_value:
                python = ["python"] if word.endswith(".py") else []
                right = " ".join(["elasticdl run", *args[:number], SEPARATOR, *python, *args[number:]])
                raise UserError(f"the program goes after {SEPARATOR}: `{right}`")


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
    kind=_ModuleCommand,
    options_metavar="--model_def MODULE[.FUNCTION] [OPTIONS]",
    help="Train a model-zoo module, on this machine, a Kubernetes cluster or Slurm, on workers that may come and go. "
    f"As in: {EXAMPLE}",
)
def train(**given: object) -> int:
    spec = make_spec(read_options(given, OPTION_GROUPS))
    if not spec.model_def:
        raise UserError("--model_def is missing: name a module below --model_zoo, as in --model_def digits.cnn_torch")
    return _run_anywhere(spec, given)


@command(
    *_options(SCRIPT_GROUPS),
    kind=_ScriptCommand,
    options_metavar="[OPTIONS] -- PROGRAM [ARGUMENTS]",
    help="Run a training script, on this machine, a Kubernetes cluster or Slurm, on workers that may come and go. It uses "
    "elasticdl.elastic (a plain loop with prepare(), the library's loop, Lightning, Hugging Face's Trainer, Keras's fit, or what Run:AI's "
    "library has), or was written for Horovod's elastic mode, which needs no change.",
)
def run(program: Sequence[str], **given: object) -> int:
    read = read_options(given, SCRIPT_GROUPS)
    if not program:
        raise UserError("the program is missing: put it after --, as in `elasticdl run -- python train.py`")
    refuse_starters(program)
    return _run_anywhere(make_spec(read, tuple(program)), given)


def _run_anywhere(spec: JobSpec, given: Mapping[str, object]) -> int:
    """Returns the exit code.

    Raises:
        UserError: something is wrong with the job; nothing was started.
        JobFailedError: the job failed.
    """
    if spec.image:
        code: int = cluster_module("cluster_run").run_job(
            spec, yaml=given["yaml"], dry_run=given["dry_run"], detach=given["detach"]
        )
        return code
    for name in ("yaml", "dry_run", *(() if spec.launcher else ("detach",))):
        if given[name]:
            raise UserError(f"--{name} is for a job on a Kubernetes cluster: give --image as well, or leave it out")
    if spec.launcher:
        return slurm_run.run_job(spec, detach=bool(given["detach"]))
    return run_job(spec)
