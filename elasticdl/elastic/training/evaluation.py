"""Evaluating a model over all members of a world, each sample once, whatever the framework.

Each member runs a contiguous share of the samples. Sums are put together by `sum_of_all`. Metrics that need all outputs at
once are for an `Evaluator`: rank 0 gathers the outputs, in pieces, and computes the metrics; the others receive these alone.

And the questions of a loop that all members answer alike.
"""

from __future__ import annotations

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import BatchPlan
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.training.inference_state import InferenceState
from elasticdl.elastic.training.job import JobContext

# Small agreements: what all members of a world must know alike, such as whether training stops.
#
# Each is one small collective. All members call it at the same point of training, which follows from the state that they share.
# If a member is lost meanwhile, `WorldBroken` is raised: some members may have heard the answer, others not, so nobody acts by it.
# All ask again at the same point in the next world.


def from_root(collective: Collective, value: Any, name: str) -> Any:
    """Rank 0's value on all members; what the others pass is not looked at.

    Raises:
        WorldBroken: a member was lost.
    """
    world = collective.world
    if world.size == 1:
        return value
    sent = pickle.dumps(value) if world.rank == 0 else b""
    return pickle.loads(collective.broadcast_bytes(sent, name))


def of_all(collective: Collective, number: float, name: str) -> list[float]:
    """The numbers of all members, by rank.

    Raises:
        WorldBroken: a member was lost.
    """
    world = collective.world
    mine = np.zeros(world.size)
    mine[world.rank] = number
    numbers: list[float] = np.asarray(collective.sum(mine, name)).tolist()
    return numbers


Array = npt.NDArray[Any]
Fetch = Callable[
    [Iterable[Array]], Generator[tuple[Any, Any], None, None]
]  # inputs and labels for each batch of indices
Metrics = Mapping[str, Callable[[Any, Any], float]]  # of labels and outputs


def my_batches(
    context: JobContext, samples: int, most: int, fetch: Fetch, world: World | None = None
) -> Generator[tuple[int, Any, Any], None, None]:
    """This member's share, in batches of at most ``most`` samples: the number of samples, inputs and labels of each.

    Close it, also after an error: a thread loads ahead.
    """
    world = world or context.collective.world
    mine = BatchPlan.equal(np.arange(samples), world.size).mine(world.rank, most)
    with closing(fetch([np.asarray(each.indices) for each in mine])) as loaded:
        for each, (inputs, labels) in zip(mine, loaded, strict=True):
            context.advance(Activity.ALIVE)
            yield each.samples, inputs, labels


def sum_of_all(context: JobContext, mine: Sequence[Array], name: str) -> list[Array]:
    """Each array summed over all members.

    Raises:
        WorldBroken: a member was lost.
    """
    with context.waiting():
        flat = np.asarray(context.collective.sum(np.concatenate([array.ravel() for array in mine]), name))
    ends = np.cumsum([array.size for array in mine])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(flat, ends), mine, strict=True)]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over the whole evaluation set; the same on all members."""

    samples: int
    metrics: dict[str, float]


@dataclass(slots=True)
class Evaluator(ABC):
    """Evaluates a model on a data set; all members call `evaluate` at the same point."""

    model: Any
    dataset: Any
    loss: Callable[[Any, Any], Any] | None  # of labels and outputs; None for predictions, whose labels nobody looks at
    metrics: Metrics
    batch_size: int  # that fits the device
    context: JobContext

    def evaluate(self, tell: Callable[..., object] = lambda *_: None, world: World | None = None) -> Evaluation:
        """``tell`` hears of this member's batches as Keras tells its callbacks: the hook's name, the batch and the logs, which
        are over this member's samples so far. ``world``: another than the present one, as `ALONE`.

        Raises:
            UserError: the model's outputs or the labels are not tensors with one row a sample, or the members have different data.
            WorldBroken: a member was lost meanwhile.
        """
        collective, world = self.context.collective, world or self.context.collective.world
        if world.size > 1:
            samples = of_all(collective, len(self.dataset), "elasticdl.evaluation.samples")
            if len(set(samples)) > 1:
                told = ", ".join(f"{number:g}" for number in samples)
                raise UserError(
                    f"evaluation: the workers' data have {told} samples: every worker must read the same data"
                )
        loss, columns, like = self._run(tell, world)
        if world.size == 1:
            return Evaluation(len(self.dataset), self._compute(loss, columns, like))
        file = io.BytesIO()
        pickle.dump((loss, columns), file)
        self.context.advance(Activity.WAIT)
        packed = collective.gather(np.frombuffer(file.getbuffer(), np.uint8), "elasticdl.evaluation")
        metrics: dict[str, float] = {}
        if world.rank == 0:
            self.context.advance(Activity.ALIVE)  # the metrics are the user's, and the others wait for them
            loss, columns = _unpacked(packed)
            del packed
            metrics = self._compute(loss, columns, like)
            self.context.advance(Activity.WAIT)
        metrics = from_root(collective, metrics, "elasticdl.evaluation.metrics")
        self.context.advance(Activity.ALIVE)
        return Evaluation(len(self.dataset), metrics)

    def _compute(self, loss: float, columns: list[Array], like: Any) -> dict[str, float]:
        """``loss``: the sum over all samples."""
        outputs, labels = self.join(columns, like)
        metrics = {"loss": loss / len(self.dataset)} if self.loss is not None else {}
        return metrics | {name: float(of(labels, outputs)) for name, of in self.metrics.items()}

    def _run(self, tell: Callable[..., object], world: World) -> tuple[float, list[Array], Any]:
        """The sum of the losses; outputs and labels, one row a sample; and those of the last batch, nested as they are."""
        tested: list[list[Array]] = []
        loss_sum, seen, like = 0.0, 0, None
        with closing(my_batches(self.context, len(self.dataset), self.batch_size, self.fetch, world)) as mine:
            for number, (rows, inputs, labels) in enumerate(mine):
                tell("on_test_batch_begin", number, {})
                like, loss = self.test(inputs, labels, rows)
                tested.append(self.flatten(like, rows))
                loss_sum, seen = loss_sum + loss * rows, seen + rows
                tell("on_test_batch_end", number, {"loss": loss_sum / seen})
        return loss_sum, [np.concatenate(column) for column in zip(*tested, strict=True)], like

    # -- what differs between frameworks --

    @abstractmethod
    def fetch(self, batches: Iterable[Array]) -> Generator[tuple[Any, Any], None, None]:
        """Inputs and labels for each batch of indices, which may be asked for ahead, by another thread."""

    @abstractmethod
    def test(self, inputs: Any, labels: Any, rows: int) -> tuple[Any, float]:
        """Outputs and labels, nested, with one row a sample, and the mean loss over so many samples, 0 without a loss."""

    def on_host(self, outputs: Any) -> Any:
        """As the user's code is given them."""
        return outputs

    @abstractmethod
    def flatten(self, value: Any, rows: int) -> list[Array]:
        """The tensors in what `test` returned, on the host, in types that no metric overflows.

        Raises:
            UserError: they are not tensors with so many rows.
        """

    @abstractmethod
    def state(self, role: str, values: dict[str, Any]) -> InferenceState:
        """Of a pass over the data. ``role``: of the data. ``values``: travel along."""

    @abstractmethod
    def join(self, columns: list[Array], like: Any) -> tuple[Any, Any]:
        """Outputs and labels as the metrics take them, nested as in what `test` returned."""


def _unpacked(packed: Sequence[Array]) -> tuple[float, list[Array]]:
    """Loss and columns of all members together; one without samples has no columns."""
    losses, shares = zip(*(pickle.loads(part.data) for part in packed), strict=True)  # of other members of the same job
    return sum(losses), [np.concatenate(parts) for parts in zip(*filter(None, shares), strict=True)]


def require_rows(what: str, tensor: Any, rows: int) -> None:
    """Raises UserError if the tensor has not one row a sample."""
    shape = tuple(tensor.shape)
    if shape[:1] != (rows,):
        raise UserError(f"{what} must have one row a sample: {rows}, but its shape is {shape}")
