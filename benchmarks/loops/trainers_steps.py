"""What `benchmarks.rescale` disturbs of the trainers that people have: elastic, with one global batch."""

from __future__ import annotations

from benchmarks.loops.options import make_parser
from benchmarks.loops.steplog import StepLog
from benchmarks.loops.trainers import ELASTIC, TRAINERS, OnStep, Team, Work, prepare_environment
from benchmarks.models import worker_batch
from benchmarks.torch_models import warm_up

WORKERS = 2  # whose batch it is


def main() -> None:
    parser = make_parser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--trainer", choices=list(TRAINERS), required=True)
    args = parser.parse_args()
    prepare_environment(ELASTIC)
    warm_up(args.model)
    log = StepLog(args.folder)

    def begin(team: Team) -> OnStep:
        def on_step(number: int) -> bool:
            log.step(number, *team.world())
            return False

        return on_step

    work = Work(args.model, args.samples, WORKERS * worker_batch(args.model), args.folder)
    TRAINERS[args.trainer](ELASTIC, work, begin)


if __name__ == "__main__":
    main()
