"""What the job is told of a trainer's evaluations and checkpoints: so that their time does not count as training."""

from __future__ import annotations

from typing import Any

from elasticdl.elastic.torch_kit.torch_job import ElasticContext

# How names of a trainer's metrics end that say how fast it evaluates, and when.
OF_SPEED = ("_runtime", "_per_second", "epoch")


def tell_evaluation(job: ElasticContext, trainer: Any, metrics: Any, seconds: float) -> None:
    numbers = {name: each for name, each in dict(metrics or {}).items() if type(each) in (int, float)}
    quality = {name: each for name, each in numbers.items() if not name.endswith(OF_SPEED)}
    about = {"step": trainer.state.global_step, "epoch": int(trainer.state.epoch or 0)}
    job.tell_work("evaluation", **about, metrics=quality, seconds=seconds)


def tell_checkpoint(job: ElasticContext, trainer: Any, folder: str, seconds: float) -> None:
    job.tell_work("checkpoint", step=trainer.state.global_step, path=folder, seconds=seconds, held=seconds)
