"""A module's ``feed(dataset, mode, metadata)``, applied to just the records of one micro-batch.

``feed`` maps a ``tf.data.Dataset`` of records to one of ``(features, labels)``. It is applied to each micro-batch by
itself, so what the plan of the job says of the order stays exact. That is traced once, as one TensorFlow function from
a batch of records to a batch of samples: building a ``tf.data`` pipeline for each costs twenty times as much and more.

* ``map``, ``prefetch``, ``cache``, ``num_parallel_calls``: as usual.
* ``shuffle``: changes the order within the micro-batch, and nothing else.
* ``batch``, ``filter``, ``repeat``, ``take``, ``skip``: refused, as each record has to give one sample. To convert a batch
  at a time, put ``unbatch`` behind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from elasticdl import Mode
from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of
from elasticdl.data.records import Records
from elasticdl.tensorflow import tf

PROBED = 3  # records that feed is tried with
SAMPLES = "each record has to give one sample: no batch without unbatch() behind it, no filter, repeat, take or skip"
PLACE_IN_GRAPH = re.compile(
    r"^(\{\{.*?\}\} )?(Error in user-defined function passed to \S+ transformation with iterator: \S+: )?"
)
EMPTY = "Dataset was empty."  # as TensorFlow says it

Feed = Callable[..., Any]


class FeedDataset:
    """Samples by index: the records of files, as ``feed`` makes them features and labels."""

    def __init__(self, records: Records, feed: Feed, mode: str) -> None:
        """Try and trace ``feed``.

        Raises:
            UserError: it does not give one pair (features, labels) for each record.
            Exception: whatever the user's code raises.
        """
        self._records, self._feed, self._mode = records, feed, mode
        self._where = f"{name_of(feed)}(dataset, {mode!r}{', metadata' * _takes_metadata(feed)})"
        with tf.device("CPU:0"):
            self._convert = self._trace()

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedDataset, (self._records, self._feed, self._mode)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, labels = self.__getitems__([index])
        row: tuple[Any, Any] = tf.nest.map_structure(lambda column: column[0], (inputs, labels))
        return row

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Features and labels of the records of these indices, as arrays, in this order if ``feed`` keeps it.

        Raises:
            UserError: a record can't be read or converted.
        """
        with tf.device("CPU:0"):
            try:
                samples = self._converted(indices)
            except tf.errors.OpError as error:
                raise UserError(f"{self._where}{self._explain(error, indices, self._converted)}") from error
            self._require(int(tf.nest.flatten(samples)[0].shape[0]), len(indices))
            inputs, labels = tf.nest.map_structure(lambda tensor: tensor.numpy(), samples)
            return inputs, labels

    def _converted(self, indices: Sequence[int]) -> Any:
        return self._convert(*map(tf.convert_to_tensor, tf.nest.flatten(self._records.read(indices))))

    @property
    def _probed(self) -> list[int]:
        return [index % len(self._records) for index in range(PROBED)]

    def _trace(self) -> Callable[..., Any]:
        probe = self._records.read(self._probed)
        self._try(probe)
        specs = [
            tf.TensorSpec([None, *column.shape[1:]], column.dtype)
            for column in map(tf.convert_to_tensor, tf.nest.flatten(probe))
        ]

        def convert(*columns: Any) -> Any:
            size = tf.shape(columns[0], tf.int64)[0]
            samples = self._apply(tf.nest.pack_sequence_as(probe, columns))
            return samples.take(size + 1).batch(size + 1).get_single_element()

        return tf.function(convert, autograph=False).get_concrete_function(*specs)  # type: ignore[no-any-return]

    def _apply(self, batch: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(batch)
        rest = (self._records.metadata,) if _takes_metadata(self._feed) else ()
        samples = self._feed(dataset, self._mode, *rest)
        spec = getattr(samples, "element_spec", ())
        if self._mode == Mode.PREDICTION and not (isinstance(spec, tuple) and len(spec) == 2):
            samples = samples.map(lambda *features: (features[0] if len(features) == 1 else features, 0))
        return samples

    def _try(self, probe: Any) -> None:
        """Run ``feed`` as it is on some records, and see what it gives."""
        samples = self._apply(probe)
        if not isinstance(samples, tf.data.Dataset):
            raise UserError(f"{self._where} returned {type(samples).__name__}; expected a tf.data.Dataset")
        spec = samples.element_spec
        if not isinstance(spec, tuple) or len(spec) != 2:
            raise UserError(f"{self._where} gives {_shown(spec)}; expected (features, labels) pairs")
        for leaf in tf.nest.flatten(spec):
            if not isinstance(leaf, tf.TensorSpec):
                raise UserError(
                    f"{self._where} gives a {type(leaf).__name__.removesuffix('Spec')}; expected dense tensors"
                )
        try:
            given = len(list(samples.take(PROBED + 1)))
        except tf.errors.OpError as error:
            raise UserError(f"{self._where}{self._explain(error, self._probed, self._tried)}") from error
        self._require(given, PROBED)

    def _require(self, given: int, records: int) -> None:
        if given != records:
            shown = "more" if given > records else given
            raise UserError(f"{self._where} gave {shown} samples for {records} records; {SAMPLES}")

    def _tried(self, indices: Sequence[int]) -> list[Any]:
        return list(self._apply(self._records.read(indices)))

    def _explain(self, error: tf.errors.OpError, indices: Sequence[int], convert: Callable[[list[int]], object]) -> str:
        """Which record it was, found by converting each alone."""
        if _first_line(error).endswith(EMPTY):
            return f" gave 0 samples for {len(indices)} records; {SAMPLES}"
        for index in indices:
            try:
                convert([index])
            except tf.errors.OpError as alone:
                return f": {self._records.place(index)}: {_first_line(alone)}"
        return f": {_first_line(error)}"


def _takes_metadata(feed: Feed) -> bool:
    """Raises:
    UserError: it takes neither (dataset, mode, metadata) nor (dataset, mode).
    """
    signature = inspect.signature(feed)
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise UserError(f"{name_of(feed)}{signature}: expected {name_of(feed)}(dataset, mode, metadata)")


def _shown(spec: Any) -> str:
    """What a data set gives, in the words of who wrote it."""
    if isinstance(spec, tuple):
        return f"{len(spec)} values"
    if isinstance(spec, dict):
        return "dicts"
    return f"single {type(spec).__name__.removesuffix('Spec').replace('Tensor', 'tensor')}s"


def _first_line(error: tf.errors.OpError) -> str:
    """What TensorFlow says went wrong, without where in its graph."""
    lines = [line.strip() for line in str(error.message).splitlines() if line.strip()]
    said = [
        line for line in lines if not line.startswith(("Graph execution error", "Detected at node", "<stack", "File "))
    ]
    return f"{type(error).__name__}: {PLACE_IN_GRAPH.sub('', (said or lines or ['no reason given'])[0])}"
