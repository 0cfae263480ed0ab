"""``elasticdl train``: train a model-zoo module."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.launch import run_job
from elasticdl.cli.options import add_options, make_spec, read_options
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import UserError
from elasticdl.common.spec import OPTION_GROUPS

EXAMPLE = "elasticdl train --model_zoo model_zoo --model_def digits.cnn_torch --num_workers 2-4 --global_batch_size 256"


def parser() -> Parser:
    made = Parser(
        "train",
        f"Train a model-zoo module on this machine, on workers that may come and go. As in: {EXAMPLE}",
        usage="elasticdl train --model_def MODULE[.FUNCTION] [OPTIONS]",
    )
    add_options(made, OPTION_GROUPS)
    return made


def command(argv: Sequence[str]) -> int:
    given = read_options(vars(parser().parse(argv)), OPTION_GROUPS)
    spec = make_spec(given)
    if not spec.model_def:
        raise UserError("--model_def is missing: name a module below --model_zoo, as in --model_def digits.cnn_torch")
    return run_job(spec)
