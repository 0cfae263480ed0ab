"""One process's part in a job that trains with Keras on TensorFlow."""

from __future__ import annotations

from elasticdl.elastic.collectives.port import Endpoint
from elasticdl.elastic.keras.backend import count_gpus, prepare_devices, require_backend, seed_keras
from elasticdl.elastic.keras.collective import KerasCollective, open_collective
from elasticdl.elastic.script.runtime import ScriptRuntime
from elasticdl.elastic.training.context import JobContext


class ElasticContext(JobContext[KerasCollective]):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    @classmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> KerasCollective:
        require_backend()
        prepare_devices()
        return open_collective(endpoint, engine, has_gpu=count_gpus() > 0)


own = ScriptRuntime(ElasticContext, seed_keras, count_gpus)  # the job that a script of one's own takes part in
