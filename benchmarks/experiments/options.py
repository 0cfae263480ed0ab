"""The command line that the experiments share, and how they end: 2 for what the user has to mend, before anything starts.

Whatever checks the command line or the cluster raises UserError for it, and does not say so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from benchmarks.harness import Parser
from benchmarks.processes import ROOT, Failed
from elasticdl.cli.signals import Interrupted, caught, interrupt
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.job.jobdir import require_writable
from elasticdl.job.quantities import parse_queue, parse_volumes

OWN_QUEUE = "own"
NO_QUEUE = "none"
SHORTEST_PACE = 1e-6
HOST_IMAGE = "local/host"  # on tier 1 any name does
OF_A_GIVEN_CLUSTER = ("namespace", "image", "volume", "training_data", "queue")


class ClusterKind(StrEnum):
    TIER1 = "tier1"  # started for the experiment: a real control plane, nodes that run pods as processes
    KUBECONFIG = "kubeconfig"  # yours, with real GPUs


class Options(argparse.Namespace):
    """Those of all experiments; what an experiment adds has no type. ``seconds_per_sample``: of a simulated GPU; 0: real ones."""

    cluster: ClusterKind
    namespace: str
    image: str
    repository: str
    volume: str
    out: Path
    scale: float
    seed: int
    training_data: str
    queue: str
    seconds_per_sample: float

    @property
    def simulated(self) -> bool:
        return self.seconds_per_sample > 0


def make_parser(name: str, description: str | None, scale: float, seconds_per_sample: float) -> Parser:
    """``scale`` and ``seconds_per_sample`` are the defaults; what else an experiment takes, it adds."""
    parser = Parser(name, description)
    parser.add_argument("--scale", type=positive,
        help=f"how many times shorter than published (tier1: {scale:g}, kubeconfig: 1)")  # fmt: skip
    parser.add_argument("--seed", type=natural, default=0, help="of everything that is drawn (0)")
    parser.add_argument("--out", type=Path, default=Path("out") / name, help=f"folder for the results (out/{name})")
    parser.add_argument("--seconds_per_sample", type=not_negative,
        help=f"of a simulated GPU; 0: real ones (tier1: {seconds_per_sample:g}, kubeconfig: 0)")  # fmt: skip
    parser.set_defaults(tier1_scale=scale, tier1_seconds=seconds_per_sample)
    parser.add_argument("--cluster", choices=[str(kind) for kind in ClusterKind], default=str(ClusterKind.TIER1))
    given = parser.add_argument_group("with --cluster kubeconfig")
    given.add_argument("--namespace", default="", help="an existing one, instead of one that is made and removed")
    given.add_argument("--image", default="", help="has elasticdl, Horovod, torch, and this repository")
    given.add_argument("--repository", default="/elasticdl", help="where the image has this repository (/elasticdl)")
    given.add_argument("--volume", default="", help="for the pods, as for `elasticdl train`")
    given.add_argument("--training_data", default="", help="CIFAR-10 as the pods see it")
    given.add_argument(
        "--queue",
        default="",
        help="for gang scheduling: kueue=NAME or volcano=NAME; own: a small scheduler that comes with the experiments and "
        "needs the right to bind pods (as with tier1); none: pods of a gang are placed one by one (the default)",
    )
    return parser


def read(parser: Parser, argv: list[str] | None = None) -> Options:
    """Ends the program with 2 if something is wrong with them."""
    options = parser.parse_args(argv, namespace=Options())
    try:
        _check(options)
    except UserError as error:
        parser.error(str(error))
    return options


def run(parser: Parser, work: Callable[[], None]) -> int:
    """Do the work and return the exit code; Ctrl-C, SIGTERM and SIGHUP unwind it like an error."""
    try:
        with caught(interrupt):
            work()
    except UserError as error:
        parser.error(str(error))
    except (ElasticDLError, Failed) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except Interrupted as signal:
        print(f"{parser.prog}: interrupted; what was measured so far is in --out", file=sys.stderr)
        return signal.exit_code
    return 0


def _check(options: Options) -> None:
    options.cluster = ClusterKind(options.cluster)
    tier1 = options.cluster is ClusterKind.TIER1
    if tier1 and (wrong := next((name for name in OF_A_GIVEN_CLUSTER if getattr(options, name)), "")):
        raise UserError(f"--{wrong} is for --cluster kubeconfig: give that as well, or leave it out")
    for name in () if tier1 else ("image", "training_data"):
        if not getattr(options, name):
            raise UserError(f"--cluster kubeconfig needs --{name}")
    if options.seconds_per_sample is None:
        options.seconds_per_sample = options.tier1_seconds if tier1 else 0.0
    if 0 < options.seconds_per_sample < SHORTEST_PACE:
        raise UserError(
            f"--seconds_per_sample {options.seconds_per_sample:g}: at least {SHORTEST_PACE:g}, or 0 for real GPUs"
        )
    if tier1 and options.tier1_seconds and not options.simulated:
        raise UserError("--cluster tier1 has no real GPUs: --seconds_per_sample must be above 0")
    queue = "" if options.queue in (OWN_QUEUE, NO_QUEUE) else options.queue
    for name, text, parse in (("volume", options.volume, parse_volumes), ("queue", queue, parse_queue)):
        try:
            parse(text)
        except ValueError as error:
            raise UserError(f"--{name} {text}: {error}") from None
    options.queue = options.queue or (OWN_QUEUE if tier1 else NO_QUEUE)
    options.scale = options.scale or (options.tier1_scale if tier1 else 1.0)
    options.image = options.image or HOST_IMAGE
    options.repository = str(ROOT) if tier1 else options.repository
    require_writable("--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()


def positive(text: str) -> float:
    if not (value := not_negative(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def counting(text: str) -> int:
    if not (value := natural(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
