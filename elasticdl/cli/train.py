"""``elasticdl train``: train a model-zoo module."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.options import add_options, make_spec, read_options
from elasticdl.cli.parser import Parser
from elasticdl.cli.submission import add_submission_options, read_submission_options, run_anywhere
from elasticdl.common.errors import UserError
from elasticdl.common.spec import OPTION_GROUPS

EXAMPLE = "elasticdl train --model_zoo model_zoo --model_def digits.cnn_torch --num_workers 2-4 --global_batch_size 256"


def parser() -> Parser:
    made = Parser(
        "train",
        f"Train a model-zoo module, on this machine or a Kubernetes cluster, on workers that may come and go. As in: {EXAMPLE}",
        usage="elasticdl train --model_def MODULE[.FUNCTION] [OPTIONS]",
    )
    add_options(made, OPTION_GROUPS)
    add_submission_options(made)
    return made


def command(argv: Sequence[str]) -> int:
    namespace = parser().parse(argv)
    given = read_options(vars(namespace), OPTION_GROUPS)
    spec = make_spec(given)
    if not spec.model_def:
        raise UserError("--model_def is missing: name a module below --model_zoo, as in --model_def digits.cnn_torch")
    return run_anywhere(spec, read_submission_options(namespace))
