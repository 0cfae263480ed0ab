"""What `benchmarks.throughput` measures of the trainers that people have."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.loops.meter import Meter
from benchmarks.loops.options import parse_measured
from benchmarks.loops.trainers import ALONE, DDP, ELASTIC, TRAINERS, OnStep, Team, Work, prepare_environment
from benchmarks.models import worker_batch

# By name: the trainer, how it trains, and on how many workers.
LOOPS = {
    f"{trainer}-{way}-{workers}": (trainer, way, workers)
    for trainer in TRAINERS
    for way, workers in ((ALONE, 1), (ELASTIC, 1), (ELASTIC, 2), (DDP, 2))
}


def main() -> None:
    args = parse_measured(LOOPS)
    trainer, way, workers = LOOPS[args.loop]
    prepare_environment(way)

    def begin(team: Team) -> OnStep:
        meter = Meter(args.warm_up, args.seconds, team.agree)
        if way == ELASTIC:
            from benchmarks.loops.check_timer import time_checks

            time_checks(meter)

        def on_step(number: int) -> bool:
            if not meter.begun:
                meter.begin()
                return False
            meter.lap("step")
            if not meter.done():
                return False
            meter.write(args.folder, team.rank())
            return True

        return on_step

    work = Work(args.model, args.samples, workers * worker_batch(args.model), args.folder)
    TRAINERS[trainer](way, work, begin)
    if dist.is_initialized():  # whose threads, left alone, now and then end the process by an abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
