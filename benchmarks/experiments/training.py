"""A training of ResNet20 as the options of `elasticdl train`."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.experiments.options import Options
from benchmarks.experiments.zoo.pace import VARIABLE

MODEL = "benchmarks.experiments.zoo.resnet20"
# One thread each: on a machine with fewer cores than workers more would only be in each other's way.
THREADS = "OMP_NUM_THREADS=1"


@dataclass(frozen=True, slots=True)
class Training:
    """``workers`` as in 4 or 1-4. The global batch is the same however many there are."""

    workers: str
    steps: int
    epochs: int
    global_batch: int
    micro_batch: int

    def flags(self, options: Options, data: str) -> list[str]:
        given = {
            "model_zoo": options.repository,
            "model_def": MODEL,
            "training_data": data,
            "num_workers": self.workers,
            "max_step": self.steps,
            "num_epochs": self.epochs,
            "global_batch_size": self.global_batch,
            "max_worker_batch_size": self.micro_batch,
            "seed": options.seed,
            "worker_resource_request": "cpu=1,memory=2Gi,gpu=1",
        }
        if options.simulated:
            given["envs"] = f"{VARIABLE}={options.seconds_per_sample:g},{THREADS}"
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]
