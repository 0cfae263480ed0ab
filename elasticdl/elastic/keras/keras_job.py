"""One process's part in a job that trains with Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.keras.backend import count_gpus, prepare_devices, require_backend, seed_keras
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.runtime import ScriptRuntime


class ElasticContext(JobContext):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    @classmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> Collective:
        require_backend()
        prepare_devices()
        return open_collective(endpoint, engine, TensorFlowTensors())

    def warm_up(self, step: TrainStep, inputs: Any, labels: Any) -> None:
        """Trace what the job may need: neither a growth nor a loss of workers shall wait for that."""
        batch = self.policy.batch_size(1)
        whole = self.least_workers == 1 and batch <= self.policy.most_at_once
        step.warm_up(inputs, labels, whole=whole, parts=self.under_master or not whole)

    def tell_couplings(self, found: Sequence[str]) -> None:
        """Into the journal, once: what depends on how batches are divided."""
        divided = self.under_master or self.policy.max_micro_batch is not None
        if divided and self.worker_id == 0:
            for text in found:
                self.warn(text)


own = ScriptRuntime(ElasticContext, seed_keras, count_gpus)  # the job that a script of one's own takes part in
