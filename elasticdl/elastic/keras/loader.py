"""The elastic data loader: from the plan's indices to micro-batches of tensors, loaded ahead by a thread.

And the context of a job that trains with Keras.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import StepPlan
from elasticdl.elastic.keras.step import TrainStep
from elasticdl.elastic.keras.tensorflow_adapter import (
    TensorFlowTensors,
    count_gpus,
    prepare_devices,
    require_backend,
    seed_keras,
)
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.training.cursor import ElasticLoader, Ordered, StepBatch, seed_generators
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.runtime import ScriptRuntime
from elasticdl.tensorflow import keras, tf

# One process's part in a job that trains with Keras on TensorFlow.


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


own = ScriptRuntime(ElasticContext, seed_keras, count_gpus)  # the job that a script of one's own takes part in


T = TypeVar("T")
Indices = npt.NDArray[np.int64]

AHEAD = 3  # items that are loaded before they are asked for: micro-batches, and the plans between them
_END = object()


def load_ahead(source: Iterator[T]) -> Generator[T, None, None]:
    """Iterate over ``source`` in a thread, `AHEAD` items ahead at most. Close it, also after an error: that waits for the item in the thread's hands.

    Raises:
        Exception: the source's own, once the items before it have been taken.
    """
    thread = ThreadPoolExecutor(1, "elasticdl-prefetch")
    try:
        items: deque[Future[Any]] = deque(thread.submit(next, source, _END) for _ in range(AHEAD))
        # No deadline: how long a user's data take is theirs; the master sees a worker that makes no progress.
        while (item := items.popleft().result()) is not _END:
            items.append(thread.submit(next, source, _END))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class Dataset(Protocol):
    """Samples by index, each a pair (inputs, labels) of arrays, numbers, strings, or dicts and tuples of those.

    A data set may also have ``__getitems__(indices)``, which returns a list of samples, as PyTorch's do, or the whole
    batch as a tuple (inputs, labels).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ElasticDataLoader(ElasticLoader[Ordered]):
    """See `ElasticLoader`.

    A batch yields this worker's micro-batches, each a pair (inputs, labels) of tensors. Samples that the thread has
    loaded ahead do not count as used. A second loop ends the first. Python's and NumPy's global generators are seeded
    anew for each step, in the thread.
    """

    def __init__(
        self,
        job: ElasticContext,
        dataset: Dataset,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int = 0,
    ) -> None:
        """As `Ordered`."""
        super().__init__(Ordered(job, dataset, shuffle=shuffle, drop_last=drop_last, steps_per_epoch=steps_per_epoch))
        self.dataset = dataset
        self._job = job
        self._items: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[StepBatch]:
        self.close()
        with closing(load_ahead(self._load(self.sampler.plans()))) as items:
            self._items = items
            for plan in items:
                if not isinstance(plan, StepPlan):  # a micro-batch that the loop over the batch did not take
                    continue
                yield self.sampler.begin(StepBatch(plan, items, self._job))
        self.sampler.end()

    def close(self) -> None:
        """Nothing is loaded from now on, until it is iterated over again."""
        if self._items is not None:
            self._items.close()

    def _load(self, plans: Iterator[StepPlan]) -> Iterator[Any]:
        """Each plan, and after it its micro-batches; runs in the thread."""
        for plan in plans:
            yield plan
            # Not TensorFlow's generators: what the model draws comes from the seeds that each micro-batch is given
            # (`step.Part`), and setting TensorFlow's seed throws all its cached operations away.
            seed_generators(plan.seed)
            for micro_batch in plan.micro_batches:
                yield load(self.dataset, np.asarray(micro_batch.indices))


def fetch(dataset: Dataset, batches: Iterable[Indices]) -> Generator[Any, None, None]:
    """Batches of tensors for given batches of indices, loaded ahead. Close it if it is not run to its end."""
    return load_ahead(load(dataset, indices) for indices in batches)


def load(dataset: Dataset, indices: Indices) -> tuple[Any, Any]:
    """One batch as tensors, (inputs, labels).

    Floating-point numbers are in Keras's own format (``keras.config.floatx()``), as in ``fit``.

    Raises:
        UserError: the samples are no pairs, or differ in shape.
        Exception: whatever the data set raises.
    """
    get_many = getattr(dataset, "__getitems__", None)
    got = get_many(indices.tolist()) if get_many else [dataset[int(index)] for index in indices]
    batch = _stack(got, indices) if isinstance(got, list) else got
    if not isinstance(batch, tuple) or len(batch) != 2:
        found = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
        raise UserError(f"a sample of {type(dataset).__name__} is {found}; expected a pair (inputs, labels) as a tuple")
    inputs, labels = keras.tree.map_structure(_to_tensor, batch)
    return inputs, labels


def _stack(samples: list[Any], indices: Indices) -> Any:
    try:
        return keras.tree.map_structure(lambda *leaves: np.stack(leaves), *samples)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"samples {indices[0]} to {indices[-1]} can't be put into one batch ({error}); all must have the same shape"
        ) from error


def _to_tensor(value: Any) -> tf.Tensor:
    if isinstance(value, tf.Tensor):
        return value
    array = np.asarray(value)
    floatx = keras.config.floatx() if array.dtype.kind == "f" else None
    return tf.convert_to_tensor(array, dtype=floatx)
