"""``elasticdl run``: run the user's own training script."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.options import add_options, make_spec, read_options
from elasticdl.cli.parser import Parser
from elasticdl.cli.submission import add_submission_options, read_submission_options, run_anywhere
from elasticdl.common.errors import UserError
from elasticdl.common.kubernetes_options import KubernetesOptions
from elasticdl.common.spec import JobOptions, OutputOptions, TimingOptions

# The model, the data, the batch, the evaluations and the checkpoints are the script's own business.
GROUPS = (JobOptions, OutputOptions, TimingOptions, KubernetesOptions)
SEPARATOR = "--"


def parser() -> Parser:
    made = Parser(
        "run",
        "Run a training script, on this machine or on a Kubernetes cluster, on workers that may come and go. It uses "
        "elasticdl.elastic, or Run:AI's names of it, or was written for Horovod's elastic mode, which needs no change.",
        usage="elasticdl run [OPTIONS] -- PROGRAM [ARGUMENTS]",
    )
    add_options(made, GROUPS)
    add_submission_options(made)
    return made


def command(argv: Sequence[str]) -> int:
    split = list(argv).index(SEPARATOR) if SEPARATOR in argv else len(argv)
    namespace = parser().parse(argv[:split])
    given = read_options(vars(namespace), GROUPS)
    program = tuple(argv[split + 1 :])
    if not program:
        raise UserError("the program is missing: put it after --, as in `elasticdl run -- python train.py`")
    return run_anywhere(make_spec(given, program), read_submission_options(namespace))
