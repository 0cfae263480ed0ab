"""What the job is told of Lightning's validations and checkpoints: so that their time does not count as training."""

from __future__ import annotations

import time
from typing import Any

from elasticdl.elastic.torch_kit.torch_job import ElasticContext


class Told:
    def __init__(self, trainer: Any, job: ElasticContext) -> None:
        self._trainer = trainer
        self._job = job
        self._began = 0.0
        self._before: dict[str, Any] = {}  # metrics

    def validation_begins(self) -> None:
        self._began, self._before = time.monotonic(), dict(self._trainer.callback_metrics)

    def validation_ends(self) -> None:
        trainer = self._trainer
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            metrics = {name: float(value) for name, value in found if value is not self._before.get(name)}
            about = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self._job.tell_work("evaluation", **about, metrics=metrics, seconds=time.monotonic() - self._began)

    def saved(self, path: str, seconds: float) -> None:
        if self._trainer.is_global_zero:
            step = self._trainer.global_step
            self._job.tell_work("checkpoint", step=step, path=path, seconds=seconds, held=seconds)
