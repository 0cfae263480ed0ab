"""What a script makes of a batch, in terms of torch's functions, so that a torn step can be made again of other samples.

A plain loop can't be run again from the middle. But a worker that is killed leaves its part of a global batch undone, and
the others have to do it in the step that they are in. So what is called between a batch and its backward pass is noted: the
model as a whole, and each function of torch's outside it. That is a loss function, as a rule, and a handful of calls.

Where the script does more (it looks at numbers, or changes what was there before the batch), the batches are given to it once more.

With it who watches the script's calls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.elastic.torch.loop_faults import (
    COPIED_ON_ITS_WAY,
    OTHER_THREAD,
    changes_a_parameter,
    place_in_script,
    works_on_another_batch,
)
from elasticdl.elastic.torch_kit.own_loader import OpenBatch
from elasticdl.elastic.torch_kit.passes import modules_of
from elasticdl.elastic.torch_kit.tensors import is_sharded_in_passes
from elasticdl.elastic.training.pieces import leaves_of


def storage_of(tensor: torch.Tensor) -> int:
    """By which views of one another are known."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return id(tensor)


class Name:
    """Stands on a tape for a tensor that was there, or was made, since the batch was given."""

    __slots__ = ("has_gradient", "is_of_batch")

    def __init__(self, *, is_of_batch: bool, has_gradient: bool) -> None:
        """``has_gradient``: by functions that are noted."""
        self.is_of_batch = is_of_batch
        self.has_gradient = has_gradient


class Names:
    """Of tensors, of which this keeps none that were computed: memory is the script's."""

    def __init__(self) -> None:
        # The id of one that is gone may be another's by now. (WeakIdKeyDictionary of torch takes four times as long.)
        self._known: dict[int, tuple[ReferenceType[torch.Tensor], Name]] = {}

    def put(self, tensor: torch.Tensor, name: Name) -> None:
        self._known[id(tensor)] = ref(tensor), name

    def get(self, leaf: Any) -> Name | None:
        known = self._known.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else None


class Size(int):
    """Of a tensor that comes of the batch. If a function of torch's is given it, as in ``x.view(x.shape[0], -1)``, it is looked up anew when
    the step is made again. To compute with it otherwise is to look at a number."""

    tape: Tape
    name: Name
    dimension: int

    @classmethod
    def of(cls, tape: Tape, name: Name, dimension: int, value: int) -> Size:
        size = cls(value)
        size.tape, size.name, size.dimension = tape, name, dimension
        return size

    def __hash__(self) -> int:
        return int(super().__hash__())

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, (int.__repr__(self),)


def _computed(operation: str) -> Callable[..., Any]:
    def compute(self: Size, *others: Any) -> Any:
        result = getattr(int, operation)(self, *others)
        # Else it is the other's to do: a tensor's by a function that is noted; a list that is repeated sees the number.
        if not (result is NotImplemented and isinstance(others[0], torch.Tensor)):
            self.tape.look("size", is_of_size=True)
        return result

    return compute


_OF_ONE = ["bool", "float", "int", "neg", "abs", "invert", "round", "trunc", "floor", "ceil"]
_OF_TWO = ["add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift"]
for _operation in (
    *["lt", "le", "gt", "ge", "eq", "ne"],
    *_OF_ONE,
    *_OF_TWO,
    *(f"r{each}" for each in _OF_TWO),
):
    setattr(Size, f"__{_operation}__", _computed(f"__{_operation}__"))


# What is noted of a batch.

BACKWARD = torch.Tensor.backward
_SHAPE: Callable[..., Any] = vars(torch._C.TensorBase)["shape"].__get__
_READS = frozenset(("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"))
_READS |= {"equal", "allclose", "is_nonzero"}
_READS_OF_SIZE = ("numel", "__len__")
SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_UNNOTED = frozenset({"_set_grad_enabled", "__repr__", "__format__"})
_CHANGES = ("requires_grad_", "__set__")  # beside those that count a tensor's version up
_TAKES_SAMPLES_APART = ("__getitem__", "unbind", "split", "split_with_sizes")


OTHER_MODE = (
    "since it was called, the model has been set to another mode (train(), eval()), or it was called with other parameters than its own, as by "
    "torch.func.functional_call"
)


def _nothing() -> None: ...


class CannotRemake(ElasticDLError):
    """What the script made of a batch depends on more than the tape knows. The text says on what."""


def _modes_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    every = modules_of([model])
    if any(map(is_sharded_in_passes, every)):
        return [(each.training,) for each in every]
    return [(each.training, *map(id, each._parameters.values())) for each in every]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    foreign: Sequence[tuple[torch.Tensor, int]]  # what was there before the batch, and its version
    with_gradient: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # devices on which it is enabled
    as_then: Callable[[], None]  # have what is called be as it was


class Tape:
    """Of one batch, from its being given to its last backward pass."""

    def __init__(
        self,
        sample: Any,
        *,
        unused: Sequence[Tape] = (),
        others: Callable[[], tuple[Container[int], Container[int]]] = lambda: ((), ()),
        rests: bool = False,
    ) -> None:
        """``unused``: of batches before it in the same loop, of which no gradients were made. ``others``: storages of parameters, and of what
        is put back when a step is torn. ``rests``: the step of one worker, which is not torn, is noted only as far as that there is one.
        """
        self.unused = list(unused)
        self.is_untouched = True  # nothing was called
        self.is_for_model = False  # which was called
        # Where the script has looked last at the number of samples, and has done nothing since.
        self.looked_at_size = ""
        self._find_others = others
        self._calls: list[_Call] = []
        self._made = Names()
        # Of what is made of the batch. What takes its place when that is gone was not there before the batch either.
        self._storages: set[int] = set()
        self._last_backward = 0  # so many calls are to be made again
        self._again: dict[Name, float] = {}  # numbers that were made again, of this worker's present part, weighed
        self._read = ""  # where the script has looked at numbers, and has computed nothing since
        self._doubt = ""  # why it can't be made again, if a backward pass follows
        self._obstacle = ""  # why it can't be made again
        self.rests = rests
        if rests:
            self._obstacle = "the batch was given to one worker alone"
            return
        leaves = leaves_of(sample)
        self._storages.update(storage_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                self._hinder(f"the batches hold a {type(leaf).__name__} beside tensors")
        self._samples = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), -1)
        self._given = self._name(sample, is_of_batch=True, has_gradient=True)

    # -- what the script calls --

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The script calls it."""
        name = getattr(function, "__name__", "")
        if name in _UNNOTED or (
            name in ("__set__", "__delete__") and attribute_set_by(function) not in ("data", "requires_grad")
        ):
            return function(*args, **kwargs)
        if self.rests:
            # Who has looked at its size alone has made nothing of the batch, and may leave it out.
            looks = name == "size" or name in _READS or name in _READS_OF_SIZE or function == _SHAPE
            self.is_untouched = self.is_untouched and looks
            return function(*args, **kwargs)
        if name == "size" or function == _SHAPE:
            return self._sizes(args[0], function(*args, **kwargs), *args[1:], **kwargs)
        if name in _READS or name in _READS_OF_SIZE:
            self.look(name, is_of_size=name in _READS_OF_SIZE)
            return function(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        self._require_present(leaves)
        self._require_made(leaves, name)
        if name in _CHANGES:
            self._require_own_change(args[0], name)
        versions = [(each, _version_of(each)) for each in leaves if isinstance(each, torch.Tensor)]
        result = function(*args, **kwargs)
        for each, before in versions:
            if _version_of(each) != before:
                self._require_own_change(each, name)
        if name in _TAKES_SAMPLES_APART and args and self._takes_apart(name, args[0], args[1:], kwargs):
            self._doubt = self._doubt or f"{place_in_script(name)} takes the samples of a batch apart"
        self._note(function, args, kwargs, leaves, result)
        return result

    def note_model(
        self, model: torch.nn.Module, args: Any, kwargs: Any, result: Any, put_back: Callable[[], None] = _nothing
    ) -> None:
        """The script has called it. ``put_back``: what it kept in attributes before.

        Raises:
            UserError: with a batch before this one.
        """
        self.is_for_model = True
        if self.rests:
            self.is_untouched = False
            return
        leaves, modes = leaves_of((args, kwargs)), _modes_of(model)

        def as_then() -> None:
            if _modes_of(model) != modes:
                raise CannotRemake(OTHER_MODE)
            put_back()

        self._require_present(leaves)
        self._require_made(leaves, type(model).__name__)
        self._note(model, args, kwargs, leaves, result, as_then)

    def note_backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if not self.rests:
            self._hinder(self._doubt)
            self._require_made([loss], "backward")
            self._add(BACKWARD, (loss,), kwargs, None)
        self._last_backward = max(len(self._calls), 1)  # 1 where an obstacle has cleared them

    def look(self, name: str, *, is_of_size: bool = False) -> None:
        """The script looks at a number."""
        self._read = place_in_script(name)
        self.looked_at_size = self._read if is_of_size else ""

    def note_dropped(self) -> None:
        """The script drops gradients that it has made for this step."""
        self._hinder(f"{place_in_script('')}: gradients are dropped before the step")

    def look_at_gradient(self, tensor: torch.Tensor) -> None:
        """The script may compute further with it, as in adversarial training."""
        if self._made.get(tensor):
            self._hinder(f"{place_in_script('')} looks at the gradient of what comes of the batch")

    @property
    def is_lost(self) -> bool:
        """The gradients that were made of this batch can't be made again, whatever the samples."""
        return bool(self._obstacle and self._last_backward)

    # -- once more --

    def remake(self, sample: Any, weight: float, backward: Callable[[torch.Tensor, dict[str, Any]], None]) -> None:
        """All that led to the gradients once more, from these samples in the place of the batch's.

        ``weight``: of these samples. ``backward`` is called for each loss, with the keywords that the script gave.

        Raises:
            CannotRemake: it can't be known that this is what the script would have made of them.
        """
        if self._obstacle or not self._last_backward:
            raise CannotRemake(self._obstacle or "there was no loss.backward()")
        present: dict[Name, torch.Tensor] = {}
        _pair(self._given, sample, present)

        def exchanged(leaf: Any) -> Any:
            if type(leaf) is slice:
                return slice(exchanged(leaf.start), exchanged(leaf.stop), exchanged(leaf.step))
            if type(leaf) is Size:
                return present[leaf.name].shape[leaf.dimension]
            return present[leaf] if type(leaf) is Name else leaf

        _, put_back = self._others
        for call in self._calls[: self._last_backward]:
            if any(_version_of(each) != before and storage_of(each) not in put_back for each, before in call.foreign):
                raise CannotRemake("since it was used, a tensor was changed that was there before the batch")
            args, kwargs = _pytree.tree_map(exchanged, (call.args, call.kwargs))
            with contextlib.ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(call.with_gradient))
                for device, dtype in call.autocast:
                    modes.enter_context(torch.autocast(device, dtype=dtype))
                if call.function is BACKWARD:
                    backward(args[0], kwargs)
                else:
                    call.as_then()
                    _pair(call.result, call.function(*args, **kwargs), present)
        for name, tensor in present.items():
            if tensor.numel() == 1:
                self._again[name] = self._again.get(name, 0.0) + float(tensor.detach()) * weight

    def begin_again(self) -> None:
        self._again = {}

    def again(self, value: Any) -> float | None:
        """What was made again in the place of this number, over this worker's present part and weighed by that."""
        name = self._made.get(value)
        return self._again.get(name) if name is not None else None

    def forget(self) -> None:
        """The step is made."""
        self._calls.clear()
        self.unused.clear()

    # -- details --

    @functools.cached_property
    def _others(self) -> tuple[Container[int], Container[int]]:
        return self._find_others()

    def _hinder(self, obstacle: str) -> None:
        self._obstacle = self._obstacle or obstacle

    def _knows(self, leaves: Sequence[Any]) -> bool:
        """Some of it comes of this batch."""
        return any(
            type(leaf) is Size or ((name := self._made.get(leaf)) is not None and name.is_of_batch) for leaf in leaves
        )

    def _require_present(self, leaves: Sequence[Any]) -> None:
        """Raises:
        UserError: the script calls something with a batch that it was given before, and not with this one.
        """
        if any(each._knows(leaves) for each in self.unused) and not self._knows(leaves):
            raise UserError(works_on_another_batch(place_in_script("")))

    def _require_made(self, leaves: Sequence[Any], name: str) -> None:
        """By functions that are noted."""
        for leaf in leaves:
            if self._obstacle or not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
                continue
            if (made := self._made.get(leaf)) is None:
                self._hinder(f"{place_in_script(name)} takes a tensor that was not made of this batch")
            elif not made.has_gradient:
                self._hinder(f"{place_in_script(name)} takes what a torch.autograd.Function has made")

    def _require_own_change(self, tensor: torch.Tensor, name: str) -> None:
        """If it does not come of the batch, a second pass changes it twice: of the script's, or by this tape. After the last backward() nothing is
        made again.

        Raises:
            UserError: and then the model is another one.
        """
        if (storage := storage_of(tensor)) in self._storages:
            return
        trained, put_back = self._others
        if name not in _CHANGES and storage in trained:
            raise UserError(changes_a_parameter(place_in_script(name)))
        if storage not in put_back:
            self._doubt = self._doubt or f"{place_in_script(name)} changes a tensor that was there before the batch"
            self._hinder(self._doubt if name in _CHANGES else "")

    def _takes_apart(self, function: str, of: Any, how: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it gives one sample of the batch, or a number of pieces of it: of another part there are more or fewer."""
        name = self._made.get(of)
        if name is None or not name.is_of_batch or not of.dim() or len(of) % max(self._samples, 1):
            return False
        if function == "__getitem__":
            index = how[0][0] if isinstance(how[0], tuple) and how[0] else how[0]
            return isinstance(index, int) and not isinstance(index, bool)
        axis = kwargs.get("dim", [*how, 0][0] if function == "unbind" else [*how[1:], 0][0])
        return axis % of.dim() == 0 and not any(type(each) is Size for each in leaves_of(how))

    def _sizes(self, tensor: torch.Tensor, found: Any, dim: int | None = None) -> Any:
        """What the script is given in the place of ``found``, the sizes of a tensor, or that in one dimension."""
        name = self._made.get(tensor)
        if name is None or not name.is_of_batch:
            return found
        if dim is not None:
            return self._size(name, dim % max(tensor.dim(), 1), found)
        return torch.Size([self._size(name, at, each) for at, each in enumerate(found)])

    def _size(self, name: Name, dimension: int, value: int) -> int:
        """As it is, if it does not depend on the number of samples."""
        if dimension and value != self._samples:
            return value
        return Size.of(self, name, dimension, value)

    def _note(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        result: Any,
        as_then: Callable[[], None] = _nothing,
    ) -> None:
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        if not given and not made:
            return
        if self._read:
            self._doubt = self._doubt or f"{self._read} looks at a number before backward()"
        self.is_untouched, self.looked_at_size = False, ""
        for leaf in given:
            if (name := self._made.get(leaf)) is not None and leaf.grad_fn is not None:
                name.has_gradient = True  # since this call
        self._storages.update({storage_of(each) for each in made} - {storage_of(each) for each in given})
        self._add(function, args, kwargs, result, as_then, is_of_batch=self._knows(leaves))

    def _add(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        as_then: Callable[[], None] = _nothing,
        *,
        is_of_batch: bool = True,
    ) -> None:
        if others := [each for each in leaves_of(result) if not isinstance(each, (torch.Tensor, *SIMPLE))]:
            self._hinder(f"the model returns a {type(others[0]).__name__}")
        if self._obstacle:
            self._calls.clear()  # and what they hold
            self._name(result, is_of_batch=is_of_batch)
            return
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in devices)
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        foreign = [(each, _version_of(each)) for each in tensors if self._made.get(each) is None]
        args, kwargs = _pytree.tree_map(lambda leaf: self._made.get(leaf) or leaf, (args, kwargs))
        result = self._name(result, is_of_batch=is_of_batch)
        self._calls.append(_Call(function, args, kwargs, result, foreign, torch.is_grad_enabled(), autocast, as_then))

    def _name(self, made: Any, *, is_of_batch: bool, has_gradient: bool = False) -> Any:
        """``made`` with what stands for its tensors in their places."""

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            name = Name(is_of_batch=is_of_batch, has_gradient=has_gradient or leaf.grad_fn is not None)
            self._made.put(leaf, name)
            return name

        return _pytree.tree_map(named, made)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _pair(before: Any, after: Any, present: dict[Name, torch.Tensor]) -> None:
    old, shape = _pytree.tree_flatten(before)
    new, new_shape = _pytree.tree_flatten(after)
    if shape != new_shape:
        raise CannotRemake("other samples give a result of another structure")
    present.update({each: other for each, other in zip(old, new, strict=True) if type(each) is Name})


def attribute_set_by(function: Callable[..., Any]) -> str:
    """Of a tensor, as in ``tensor.data = ...``; empty for any other function."""
    if getattr(function, "__name__", "") not in ("__set__", "__delete__"):
        return ""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


@dataclass(slots=True)
class NotedBatch(OpenBatch):
    """An open batch, and what the script has made of it."""

    tape: Tape = field(default_factory=lambda: Tape(None))
    weight: float = 0.0  # of this worker's part, as the script was given it
    loss: ReferenceType[torch.Tensor] | None = None  # of backward(), if it was called once

    def begin_again(self) -> None:
        OpenBatch.begin_again(self)
        self.tape.begin_again()

    def forget(self) -> None:
        self.tape.forget()


def weighed_backward(loss: torch.Tensor, kwargs: dict[str, Any], factor: float) -> None:
    """``loss.backward(**kwargs)``, whose gradients are multiplied by ``factor``."""
    if factor != 1.0:
        gradient = kwargs.get("gradient")
        kwargs = {**kwargs, "gradient": torch.ones_like(loss) * factor if gradient is None else gradient * factor}
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


# Sees what a script calls of torch's functions while it works on a batch, and has a `Tape` note it.

GET_GRADIENT: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__get__
GRADIENT_BY = torch.autograd.grad


class Listener(Protocol):
    """Who wants to know what the script does with a batch."""

    @property
    def is_on_its_way(self) -> bool:
        """What the script does has no effect, and its model is not the job's."""

    def noted(self) -> Callable[[], None]:
        """What puts back what modules keep in attributes now."""

    def before_look(self, tensor: torch.Tensor) -> None:
        """The script looks at a tensor's gradient."""

    def before_set(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The script replaces a tensor's gradient."""

    def before_grad(self, inputs: Sequence[torch.Tensor]) -> None:
        """The script calls ``torch.autograd.grad`` by these."""

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """The script calls ``loss.backward``."""


class Watch(TorchFunctionMode):
    """Sees the functions of torch's that the script calls while it works on a batch."""

    tape: Tape | None = None  # on which is noted what is called
    is_active = False  # the script works on a batch

    def __init__(self, model: torch.nn.Module, host: Listener) -> None:
        super().__init__()
        _hide_from_compiler()
        self.host = host
        self._thread = 0  # that loops over the batches
        self._within = 0  # calls of the model, one in another
        self._put_back: Callable[[], None] = _nothing  # what the model kept in attributes before the call
        model.register_forward_pre_hook(_Hook(self, Watch.enter_model), prepend=True, with_kwargs=True)
        model.register_forward_hook(_Hook(self, Watch.leave_model), with_kwargs=True, always_call=True)

    @contextlib.contextmanager
    def around_batch(self) -> Iterator[None]:
        """Within, the script works on it."""
        self._thread, self.is_active = threading.get_ident(), True
        self.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.tape, self.is_active = None, False
            if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
                self.__exit__(None, None, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, torch's functions are called as ever.

        Raises:
            UserError: another thread loops over the batches.
        """
        if self._thread not in (0, threading.get_ident()):
            raise UserError(OTHER_THREAD)
        pausing = self.is_active and _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if pausing:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if pausing:
                self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is GRADIENT_BY:
            inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
            self.host.before_grad([inputs] if isinstance(inputs, torch.Tensor) else inputs)
        if func == GET_GRADIENT:
            self.host.before_look(args[0])
        elif func is BACKWARD:
            given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False))
            return self.host.backward(args[0], {**given, **kwargs})
        elif attribute_set_by(func) == "grad":
            self.host.before_set(args[0], args[1] if len(args) > 1 else None)
        elif self.tape is not None:
            return self.tape.call(func, args, kwargs)
        return func(*args, **kwargs)

    def enter_model(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._within:
            self._within += 1
        elif self.is_active and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)
            self._within = 1
            if self.tape is not None and not self.tape.rests:
                self._put_back = self.host.noted()

    def leave_model(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if self._within == 1:
            if self.tape is not None:
                self.tape.note_model(model, args, kwargs, result, self._put_back)
            self.__enter__()  # type: ignore[no-untyped-call]
        self._within = max(0, self._within - 1)


@dataclass(frozen=True, slots=True)
class _Hook:
    """Of the model; a copy of the model has another one."""

    watch: Watch
    act: Callable[..., None]

    def __call__(self, *given: Any) -> None:
        self.act(self.watch, *given)

    def __reduce__(self) -> tuple[type[_HookOfCopy], tuple[bool]]:
        return _HookOfCopy, (self.watch.host.is_on_its_way,)


@dataclass(frozen=True, slots=True)
class _HookOfCopy:
    """``is_late``: the model had not got the job's parameters."""

    is_late: bool

    def __call__(self, *_: Any) -> None:
        """In a loop of the job's, and not in one on the way there, nor between two loops.

        Raises:
            UserError: others have another model.
        """
        if self.is_late and isinstance(_get_current_function_mode(), Watch):  # type: ignore[no-untyped-call]
            raise UserError(COPIED_ON_ITS_WAY)


@functools.cache
def _hide_from_compiler() -> None:
    """A script may compile the prepared model, or a step that calls it: the hooks are called as they are. No decorators, as these import the compiler."""
    for each in (_Hook, _HookOfCopy):
        each.__call__ = torch.compiler.disable(each.__call__)  # type: ignore[method-assign, no-untyped-call]
