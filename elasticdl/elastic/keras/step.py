"""One optimizer step of a Keras model in traced functions, none of which knows the world.

`micro` computes what a micro-batch contributes and changes nothing; `apply` changes model and optimizer, once all
contributions of all workers have been summed. Between the two stands the collective, outside any graph. So each function
is traced once, however often the world changes, and a step that is torn leaves the model as it was. A worker that has the
whole global batch in one micro-batch has nobody to wait for: `whole` is both in one call.

And the forward pass, and how gradients lie in the vectors that are summed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.training_step import VOTE_SIZE
from elasticdl.tensorflow import keras, tf

# How the sums of a step lie in one buffer: a traced function and the collective hand each other one tensor.

Shape = tuple[int, ...]
Sums = list[tf.Tensor]

ROW = 16  # elements: at least the 64 bytes by which TensorFlow aligns memory


class Layout:
    """Rows of numbers: those of each gradient, then those of the other variables, then the report for the host.

    Each gradient begins at a row, so TensorFlow takes it out without copying it. The other variables' sums are copied:
    a variable that kept a piece of the buffer would keep all of it in memory.
    """

    def __init__(self, gradients: Sequence[Shape], others: Sequence[Shape], report: Sequence[Shape]) -> None:
        self._gradients = list(gradients)
        self._others = [math.prod(shape) for shape in others]
        self._shapes = [*gradients, *others]
        self._report = sum(map(math.prod, report))
        sizes = [*(math.prod(shape) for shape in gradients), sum(self._others), self._report]
        self._rows = [-(-size // ROW) for size in sizes]
        self._padding = [rows * ROW - size for rows, size in zip(self._rows, sizes, strict=True)]

    # -- while a function is traced --

    def pack(self, sums: Sums, report: Sums) -> tf.Tensor:
        """``sums``: of gradients and other variables. Returns all, shape (rows, ROW)."""
        count = len(self._gradients)
        parts = [*([each] for each in sums[:count]), sums[count:], report]
        flat = [
            tf.reshape(each, [-1])
            for part, padding in zip(parts, self._padding, strict=True)
            for each in (*part, tf.zeros(padding, report[0].dtype))
        ]
        return tf.reshape(tf.concat(flat, 0), [-1, ROW])

    def unpack(self, rows: tf.Tensor) -> Sums:
        """The sums of gradients and other variables."""
        *parts, others, _ = tf.split(rows, self._rows)
        flat = [self._without(padding, part) for part, padding in zip(parts, self._padding, strict=False)]
        flat += tf.split(self._without(self._padding[-2], others), self._others) if self._others else []
        return [tf.reshape(part, shape) for part, shape in zip(flat, self._shapes, strict=True)]

    @staticmethod
    def _without(padding: int, rows: tf.Tensor) -> tf.Tensor:
        return tf.reshape(rows, [-1])[:-padding] if padding else tf.reshape(rows, [-1])

    # -- on the host --

    def read_report(self, rows: tf.Tensor) -> Any:
        """All numbers of the report, as an array."""
        start = sum(self._rows[:-1])
        on_host = rows.device.endswith("CPU:0")
        last = np.asarray(memoryview(rows))[start:] if on_host else rows[start:].numpy()
        return last.ravel()[: self._report].copy()

    def nothing(self, ballot: Sequence[float], dtype: str) -> tf.Tensor:
        """Zeros, but for the end of the report."""
        flat = np.zeros(sum(self._rows) * ROW, dtype)
        end = flat.size - self._padding[-1]
        flat[end - len(ballot) : end] = ballot
        return tf.convert_to_tensor(flat.reshape(-1, ROW))


# A forward pass of a micro-batch, while it is traced: it changes nothing.
#
# What the model and the loss set is noted (`ForwardScope`), and what else they read is found (`captured`). Where a mask leaves elements out,
# it is found what the mean loss was divided by (`share_left`): Keras divides the loss of a batch by the number of its elements that
# are not masked. So a micro-batch contributes its loss times the share of its elements that are left, and what is summed is
# divided by the share over the whole batch.

REMEDY = "keep it as a weight of a layer, by add_weight(trainable=False), or as a variable that a callback sets"


class ForwardScope(keras.StatelessScope):  # type: ignore[misc]
    """Within, variables have the given values, and new ones go nowhere but here."""

    def __init__(self, begun: Sequence[tuple[Any, Any]], settable: Iterable[Any]) -> None:
        """``begun``: variables, and what they begin with; only the ``settable`` ones may be set."""
        super().__init__(begun, collect_losses=True)
        self._settable = {id(variable) for variable in settable}
        self.foreign: list[Any] = []  # others that were set

    def add_update(self, update: tuple[Any, Any]) -> None:
        if id(update[0]) not in self._settable:
            self.foreign.append(update[0])
        super().add_update(update)


def captured(graph: Any, known: Iterable[Any]) -> list[Any]:
    """TensorFlow's variables that a function reads, without the ``known`` ones; in the order of its operations.

    ``graph``: of the function, once it has been traced.
    """
    without = set(map(id, known))
    place = {id(tensor): number for number, tensor in enumerate(graph.external_captures)}
    found = [variable for variable in graph.variables if id(variable) not in without]
    return sorted(found, key=lambda variable: (place.get(id(variable.handle), len(place)), variable.name))


def refuse_foreign(variables: Sequence[Any], model: keras.Model) -> None:
    """``variables``: that were set in a pass, and may not be. What metrics of layers count is not needed.

    Raises:
        UserError: there are others.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    counted = {id(variable) for metric in model.metrics for variable in metric.variables}
    for variable in variables:
        if id(variable) in trained:
            raise UserError(
                f"the model sets {variable.path}, which is trained, whenever it is called, as SpectralNormalization does; what the "
                "workers make of it can't be put together: set it in a callback, or give the layer a constraint"
            )
        if id(variable) not in counted:
            raise UserError(
                f"the model or the loss sets {variable.path}, which is no weight of the model that holds numbers: {REMEDY}"
            )


# -- masks --

LEAST = 1e-12  # share, of a batch of which nothing is left: regularizers count there, too


def share_left(outputs: Any, loss: tf.Tensor, *, more_losses: bool) -> tf.Tensor | None:
    """Of a batch's elements, those that are not masked; None if nothing is. While a function is traced.

    ``loss``: of ``outputs``; ``more_losses``: others, of the batch, were added to it.

    Raises:
        UserError: the loss can't be put together from parts of a batch.
    """
    leaves = keras.tree.flatten(outputs)
    masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
    there = [mask for mask in masks if mask is not None]
    if not there or not reads(loss, there, leaves):
        return None
    problem = "a mask leaves elements out of the loss, but not of what add_loss or a regularizer of outputs adds"
    if any(mask is not masks[0] for mask in masks):
        problem = "its outputs have different masks, and each loss is a mean over what its mask leaves"
    elif not more_losses:
        return tf.maximum(tf.reduce_mean(tf.cast(there[0], tf.float32)), LEAST)
    raise UserError(f"the model can't be trained on parts of a batch: {problem}")


def has_losses_of_batches(model: keras.Model) -> bool:
    """Within the scope of a call: whether it had losses besides those of regularized weights."""
    return len(model.losses) > sum(variable.regularizer is not None for variable in model.trainable_variables)


def reads(value: tf.Tensor, wanted: Sequence[tf.Tensor], ends: Sequence[tf.Tensor] = ()) -> bool:
    """Whether a tensor was computed from one of the ``wanted`` other than by way of the ``ends``."""
    targets, passed, open_ = {id(each) for each in wanted}, {id(each) for each in ends}, [value]
    while open_:
        tensor = open_.pop()
        if id(tensor) in targets:
            return True
        if id(tensor) not in passed:
            passed.add(id(tensor))
            open_ += tensor.op.inputs
    return False


LossFunction = Callable[[Any, Any], Any]

SEED_NAME = "seed_generator_state"  # as Keras names the state of a SeedGenerator


class OtherVariables:
    """What a model has besides its trainable variables. Methods are called while a function is traced.

    - Statistics (floating point, as of batch norm): the mean over all micro-batches of a step, weighed by samples.
    - Counters (integers): move by what the step's very first micro-batch moves them, whatever the number of workers.
    - Seeds (of dropout, augmentation): given anew to each micro-batch, and never changed in the model.
    - Anything else (flags, strings) must stay as it is.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.all = list(variables)
        seeds = [v for v in variables if v.path.rpartition("/")[2] == SEED_NAME]
        self._seeds = {id(variable): number for number, variable in enumerate(seeds)}
        self._statistics = [i for i, v in enumerate(variables) if tf.as_dtype(v.dtype).is_floating]
        self._counters = [
            i for i, v in enumerate(variables) if tf.as_dtype(v.dtype).is_integer and id(v) not in self._seeds
        ]
        moved = [self.all[i] for i in (*self._statistics, *self._counters)]
        self.settable = [*seeds, *moved]
        self.shapes = [tuple(v.shape) for v in moved]
        self.dtypes = ["float64" if tf.as_dtype(v.dtype) == tf.float64 else "float32" for v in moved]

    def values(self, draw: tf.Tensor) -> list[tf.Tensor]:
        """What a micro-batch starts with; ``draw``: two int64, the seed of its random draws and its number within the step."""
        return [
            self._seed(self._seeds[id(variable)], variable, draw)
            if id(variable) in self._seeds
            else tf.convert_to_tensor(variable.value)
            for variable in self.all
        ]

    def deltas(self, old: Sequence[Any], new: Sequence[Any], weight: tf.Tensor, is_first: tf.Tensor) -> list[tf.Tensor]:
        """What a micro-batch contributes to the sums of its step; ``is_first`` is 1 for the first, else 0."""
        statistics = [tf.cast(new[i], tf.float64) * tf.cast(weight, tf.float64) for i in self._statistics]
        counters = [tf.cast(new[i] - old[i], tf.float64) * tf.cast(is_first, tf.float64) for i in self._counters]
        return [tf.cast(delta, dtype) for delta, dtype in zip((*statistics, *counters), self.dtypes, strict=True)]

    def assign(self, sums: Sequence[tf.Tensor]) -> None:
        """Set the variables to what the sums of all micro-batches say."""
        count, moved = len(self._statistics), len(self.shapes)
        for i, value in zip(self._statistics, sums[:count], strict=True):
            self.all[i].assign(tf.cast(value, self.all[i].dtype))
        for i, move in zip(self._counters, sums[count:moved], strict=True):
            self.all[i].assign_add(tf.cast(tf.round(move), self.all[i].dtype))

    @staticmethod
    def _seed(number: int, variable: Any, draw: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([draw[0] + (number << 32), draw[1] * (1 << 32)])
        return tf.cast(seed, variable.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """What a traced function is told of a micro-batch."""

    weight: float  # its samples, as a part of the global batch
    is_first: bool  # the step's very first: number 0 of rank 0
    seed: int  # of its random draws, 32 bits
    count: int  # of the micro-batch within the worker's step
    ballot: Sequence[float] = (0.0,) * VOTE_SIZE  # what it adds to the vote (`elasticdl.elastic.core.training_step`)

    def to_array(self) -> Any:
        return np.array([self.weight, self.is_first, self.seed, self.count, *self.ballot], np.float64)


class TrainStep:
    """Model, loss and optimizer as the functions of which a step is made.

    What they hand each other is one tensor, as `Layout` says. Its report ends with the mean loss and the vote.
    """

    def __init__(self, model: Any, loss: LossFunction, optimizer: Any, counted: Sequence[tuple[Any, Any]] = ()) -> None:
        """``loss(labels, predictions)``: the mean over the micro-batch, or one value per sample, which is meaned.

        Builds the optimizer. XLA compiles what Keras's own ``fit`` would have it compile (``model.jit_compile``).
        ``counted``: further variables that the loss may set, and what they begin with in each micro-batch, as those of metrics.
        Their changes stand before the loss in the report.

        Raises:
            UserError: the model is not built, or is not one of Keras.
        """
        _check(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.traces: Counter[str] = Counter()
        self.has_whole = True  # else tracing `whole` would be a pause that `micro` and `apply` spare
        self.loss = loss
        self.counted = list(counted)
        self._trainable = list(model.trainable_variables)
        self._others = OtherVariables(model.non_trainable_variables)
        if not optimizer.built:
            optimizer.build(self._trainable)
        parameters = inspect.signature(model.call).parameters.values()
        takes_training = any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)
        self._training = {"training": True} if takes_training else {}
        dtypes = (*(str(variable.dtype) for variable in self._trainable), *self._others.dtypes)
        self.dtype = "float64" if "float64" in dtypes else "float32"  # of all sums: wide enough for each
        shapes = [tuple(variable.shape) for variable in self._trainable]
        self._shapes = shapes, self._others.shapes, [*(first.shape for _, first in counted), (), (VOTE_SIZE,)]
        self._left_alone: frozenset[int] = frozenset()  # numbers of those that the loss does not depend on
        self._masked = False
        self._layout = Layout(*self._shapes)
        # Most of the work is in two inner functions, traced once for all outer ones. They are not inlined, so TensorFlow
        # rearranges each by itself, and the numbers are the same whatever stands around.
        self.jit_compile = bool(model.jit_compile) or None  # False would forbid it to outer functions
        inner = functools.partial(
            tf.function,
            autograph=False,
            reduce_retracing=True,
            jit_compile=self.jit_compile,
            experimental_attributes={"_noinline": True},
        )
        self._differentiate = inner(self._trace_micro)
        self._update = inner(self._trace_apply)
        self._micro = tf.function(self._pack, reduce_retracing=True, autograph=False)
        self.add = tf.function(self._trace_add, autograph=False)  # of two sums
        self._apply = tf.function(self._unpack, autograph=False)
        self._applied: Any = None  # what was traced of it, for the only kind of sums that there is
        self._captured: list[tuple[Any, Any]] = []  # variables, and what they were when they were found
        self._known: dict[str, tuple[Any, Any]] = {}  # kind of the first samples, and what was traced for it
        self._whole = tf.function(self._trace_whole, reduce_retracing=True, autograph=False)

    # -- what a step does --

    def micro(self, inputs: Any, labels: Any, part: Part) -> tf.Tensor:
        """What a micro-batch adds to the sums of its step."""
        return self._call("micro", self._micro, inputs, labels, part)

    def nothing(self, ballot: Sequence[float]) -> tf.Tensor:
        """The sums of a worker that has no micro-batch in this step."""
        return self._layout.nothing(ballot, self.dtype)

    def apply(self, sums: tf.Tensor) -> None:
        """Update model and optimizer by the sums over all micro-batches of all workers."""
        if self._applied is None:
            self._applied = self._apply.get_concrete_function(sums)
            self._note(self._applied)
        self._applied(sums)

    def whole(self, inputs: Any, labels: Any, part: Part) -> Any:
        """`micro` and `apply` at once, for the only micro-batch of a step; returns its report."""
        return self._read(self._call("whole", self._whole, inputs, labels, part).numpy())

    def read_report(self, sums: tf.Tensor) -> Any:
        """An array whose end is the mean loss over the micro-batches that were summed, and their vote."""
        return self._read(self._layout.read_report(sums))

    def _read(self, report: Any) -> Any:
        if not self._masked:
            return report
        report[-1 - VOTE_SIZE] /= report[0] or 1.0
        return report[1:]

    def warm_up(self, inputs: Any, labels: Any, *, whole: bool = True, parts: bool = True) -> None:
        """Trace and run what will be needed; model and optimizer are afterwards as before.

        ``whole``: also `whole`, else ``has_whole`` becomes false; ``parts``: also `micro`, `add` and `apply`.

        Raises:
            Exception: whatever the model or the loss raises on this micro-batch.
        """
        variables = [*self.model.variables, *self.optimizer.variables]
        before = [(variable, variable.numpy()) for variable in variables]
        part = Part(weight=1.0, is_first=True, seed=0, count=0)
        self.has_whole = whole
        if whole:
            self.whole(inputs, labels, part)
        if parts:
            sums = self.micro(inputs, labels, part)
            self.apply(self.add(sums, self.nothing(part.ballot)))
        for variable, value in (*before, *self._captured):
            variable.assign(value)

    def _call(self, name: str, function: Any, inputs: Any, labels: Any, part: Part) -> Any:
        """Of samples like the first, of any number, it is known what was traced for them: TensorFlow need not look."""
        arguments = (inputs, labels, tf.constant(part.to_array()))
        kind = [(leaf.dtype, leaf.shape[1:]) for leaf in keras.tree.flatten((inputs, labels))]
        if name not in self._known:
            traced = function.get_concrete_function(*any_batch(inputs, labels), arguments[2])
            self._known[name] = kind, traced
            self._note(traced)
        first, concrete = self._known[name]
        return (concrete if kind == first else function)(*arguments)

    @property
    def trained(self) -> str:
        """Which of the model's variables are trained, and the shapes of all sums: on all workers the same."""
        numbers = {id(variable): number for number, variable in enumerate(self.model.variables)}
        return repr(([numbers.get(id(variable)) for variable in self._trainable], self._shapes))

    @property
    def captured(self) -> list[Any]:
        """Variables that are neither Keras's nor the model's: model and loss read them, or an optimizer of the user's own keeps them."""
        return [variable for variable, _ in self._captured]

    def _note(self, traced: Any) -> None:
        counted = [variable for metric in self.model.metrics for variable in metric.variables]
        known = [*self.model.variables, *self.optimizer.variables, *counted]
        found = captured(traced.graph, [*(each.value for each in known), *self.captured])
        self._captured += [(each, each.numpy()) for each in found]

    # -- traced --

    def _pack(self, inputs: Any, labels: Any, part: tf.Tensor) -> tf.Tensor:
        self.traces["micro"] += 1
        sums, report = self._differentiate(inputs, labels, part)
        return self._layout.pack(sums, report)

    def _unpack(self, sums: tf.Tensor) -> None:
        self.traces["apply"] += 1
        self._update(self._layout.unpack(sums))

    def _trace_whole(self, inputs: Any, labels: Any, part: tf.Tensor) -> tf.Tensor:
        self.traces["whole"] += 1
        sums, report = self._differentiate(inputs, labels, part)
        with tf.control_dependencies([*sums, *report]):  # an error in one of them leaves all variables as they were
            self._update(sums)
        return tf.concat([tf.reshape(each, [-1]) for each in report], 0)

    def _trace_micro(self, inputs: Any, labels: Any, part: tf.Tensor) -> tuple[Sums, Sums]:
        """What is summed for the variables, and the report."""
        self.traces["differentiate"] += 1
        weight, is_first, draw = part[0], part[1], tf.cast(part[2:4], tf.int64)
        trainable = [tf.convert_to_tensor(variable.value) for variable in self._trainable]
        others = self._others.values(draw)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            scope = self._scope(trainable, others)
            loss, share = self._forward(scope, inputs, labels)
            left = [] if share is None else [weight * tf.cast(share, weight.dtype)]
            mean = loss * tf.cast(left[0] if left else weight, loss.dtype)
            scaled = self.optimizer.scale_loss(mean)
        moved = [scope.get_current_value(variable) for variable in self._others.all]
        deltas = self._others.deltas(others, moved, weight, is_first)
        refuse_foreign(scope.foreign, self.model)
        self._make_room(masked=bool(left))
        gradients = tape.gradient(scaled, trainable)
        self._left_alone = frozenset(number for number, each in enumerate(gradients) if each is None)
        pairs = zip(gradients, trainable, strict=True)
        sums = [*(tf.zeros_like(v) if each is None else each for each, v in pairs), *deltas, *left]
        report = [*left, *self._changes(scope), mean, part[4:]]
        return [tf.cast(each, self.dtype) for each in sums], [tf.cast(each, self.dtype) for each in report]

    def _scope(self, trainable: Sums, others: Sums) -> ForwardScope:
        begun = [
            *zip(self._trainable, trainable, strict=True),
            *zip(self._others.all, others, strict=True),
            *self.counted,
        ]
        return ForwardScope(begun, [*self._others.settable, *(variable for variable, _ in self.counted)])

    def _changes(self, scope: ForwardScope) -> Sums:
        return [tf.cast(scope.get_current_value(variable) - first, self.dtype) for variable, first in self.counted]

    def _make_room(self, *, masked: bool) -> None:
        """For the share of what a mask leaves, among the sums and before the report."""
        if masked and not self._masked:
            gradients, others, report = self._shapes
            self._masked, self._layout = True, Layout(gradients, [*others, ()], [(), *report])

    def _forward(self, scope: ForwardScope, inputs: Any, labels: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The mean loss with the scope's values of the variables, and over which share of the elements, if not all."""
        with scope:
            outputs = keras.tree.map_structure(widen, self.model(inputs, **self._training))
            loss = tf.reduce_mean(self.loss(labels, outputs))
            share = share_left(outputs, loss, more_losses=has_losses_of_batches(self.model))
            for term in self.model.losses:  # of regularizers and add_loss
                loss += tf.cast(term, loss.dtype)
        return loss, share

    def _trace_add(self, sums: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
        self.traces["add"] += 1
        return sums + more

    def _trace_apply(self, sums: Sums) -> None:
        self.traces["update"] += 1
        count = len(self._trainable)
        self._others.assign(sums[count:])
        if self._masked:
            sums = [tf.math.divide_no_nan(each, tf.cast(sums[-1], each.dtype)) for each in sums[:count]]
        gradients = [
            None if number in self._left_alone else tf.cast(each, variable.dtype)
            for number, (each, variable) in enumerate(zip(sums[:count], self._trainable, strict=True))
        ]
        self.optimizer.apply_gradients(zip(gradients, self._trainable, strict=True))  # what Keras's fit calls


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, keras.Model):
        raise UserError(f"the model is a {type(model).__name__}; expected a keras.Model")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"the optimizer is a {type(optimizer).__name__}; expected a keras.optimizers.Optimizer")
    if not model.built:
        raise UserError(
            f"the model {model.name} is not built, so it has no weights yet: give it a keras.Input, or call it once on a batch"
        )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UserError(
                f"the model {model.name} computes in float8: {variable.path} follows the largest value of a whole batch, which "
                "is not to be had from its parts; give it another dtype policy"
            )


def widen(output: Any) -> Any:
    """As Keras does before a loss: in half precision a scaled loss would overflow."""
    half = getattr(output, "dtype", None) in (tf.float16, tf.bfloat16)
    return tf.cast(output, tf.float32) if half else output


def any_batch(*samples: Any) -> tuple[Any, ...]:
    """The signature of these tensors with any number of samples."""
    specs: tuple[Any, ...] = keras.tree.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), samples
    )
    return specs
