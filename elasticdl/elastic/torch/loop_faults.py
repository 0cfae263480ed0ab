"""What a plain loop does that can't be right, each in one line.

With it what a loop changes in place.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import io
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch

from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.training.attributes import is_scripts_own
from elasticdl.elastic.training.nested import leaves as leaves_of

# What a script changes in place while it works on a batch, kept as it was before: a step that is torn is made again from there.
#
# A counter that is a tensor, a weight decay of one's own, a table of features: whatever was there before the batch, and was not made of it.

_OF_NUMBERS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow")
_OF_BITS = ("and", "or", "xor", "lshift", "rshift")
_OPERATORS = frozenset(f"__i{name}__" for name in (*_OF_NUMBERS, *_OF_BITS))
_OTHERS = frozenset({"__setitem__", *_OPERATORS})
_OF_RUNNING_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # which come behind the input
_ATTRIBUTES = ("data", "requires_grad")
_HARMLESS = frozenset({"requires_grad_", "retain_grad", "share_memory_", "rename_"})


class _Was(Protocol):
    """How something was."""

    @property
    def storage(self) -> int:
        """Whose it is; 0 for none."""

    def put_back(self) -> None: ...

    def at_present(self) -> Self:
        """How the same is now."""


@dataclass(frozen=True, slots=True)
class _Values:
    alias: torch.Tensor  # of the same memory, without a version that a backward pass has noted
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        alias = tensor.data
        return cls(alias, alias.clone())

    @property
    def storage(self) -> int:
        return storage_of(self.alias)

    def put_back(self) -> None:
        self.alias.copy_(self.copy)

    def at_present(self) -> Self:
        return self.of(self.alias)


@dataclass(frozen=True, slots=True)
class _Attribute:
    tensor: torch.Tensor
    name: str
    value: Any
    storage: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> Self:
        return cls(tensor, name, getattr(tensor, name))

    def put_back(self) -> None:
        setattr(self.tensor, self.name, self.value)

    def at_present(self) -> Self:
        return self.of(self.tensor, self.name)


@dataclass(frozen=True, slots=True)
class Changes:
    """How something is that was changed."""

    every: Sequence[_Was] = ()

    @torch.no_grad()
    def put_back(self, besides: Container[int] = ()) -> None:
        """All but what has one of these storages."""
        for was in self.every:
            if was.storage not in besides:
                was.put_back()


class InPlace:
    """What was changed from the time that a batch is given, until the next one is."""

    def __init__(self, sample: Any) -> None:
        self._was: dict[Any, _Was] = {}
        # Memory of what is made of the batch. What takes its place when that is gone was not there before the batch either.
        self._made = {storage_of(leaf) for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)}

    def before(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The script calls this next."""
        name = getattr(function, "__name__", "")
        if name == "requires_grad_":
            self._keep_attribute(args[0], "requires_grad")
        elif (attribute := attribute_set_by(function)) in _ATTRIBUTES:
            self._keep_attribute(args[0], attribute)
        elif (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS) or name in _OTHERS:
            self._keep(args[:1])
        elif name in _OF_RUNNING_STATISTICS:
            self._keep((args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")))
        elif kwargs.get("out") is not None:
            self._keep(kwargs["out"])

    def after(self, args: Any, result: Any) -> None:
        """It has returned."""
        given = {storage_of(leaf) for leaf in args if isinstance(leaf, torch.Tensor)}
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and (storage := storage_of(leaf)) not in given:
                self._made.add(storage)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Of the batch, or since it was given."""
        return storage_of(tensor) in self._made

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether it may be changed."""
        storage = storage_of(tensor)
        return storage in self._made or any(was.storage == storage for was in self._was.values())

    def undo(self, later: Sequence[InPlace], settled: Container[int]) -> Changes:
        """All is as before this batch. Returns how it was changed.

        ``later``: of the batches that were given since. ``settled``: storages of what is put back otherwise.
        """
        every = [was for each in (self, *later) for was in each._was.values() if was.storage not in settled]
        with torch.no_grad():
            changes = Changes([was.at_present() for was in every])
        Changes(every[::-1]).put_back()
        return changes

    @contextlib.contextmanager
    def undone(self, later: Sequence[InPlace], settled: Container[int]) -> Iterator[None]:
        """Within, all is as before this batch; afterwards it is as it is now."""
        changes = self.undo(later, settled)
        try:
            yield
        finally:
            changes.put_back()

    def _keep(self, given: Any) -> None:
        for tensor in leaves_of(given):
            if isinstance(tensor, torch.Tensor) and (storage := storage_of(tensor)) not in self._made:
                place = (
                    (tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.layout is torch.strided else ()
                )
                if (storage, place) not in self._was:
                    self._was[storage, place] = _Values.of(tensor)

    def _keep_attribute(self, tensor: torch.Tensor, name: str) -> None:
        if storage_of(tensor) not in self._made and (id(tensor), name) not in self._was:
            self._was[id(tensor), name] = _Attribute.of(tensor, name)


def attribute_set_by(function: Callable[..., Any]) -> str:
    """Of a tensor, as in ``tensor.data = ...``; empty for any other function."""
    if getattr(function, "__name__", "") not in ("__set__", "__delete__"):
        return ""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


def storage_of(tensor: torch.Tensor) -> int:
    """By which views of one another are known."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return id(tensor)


HINT = "and begin that loop with gradients on (with torch.no_grad() around it, it is given whole batches, for an evaluation)"
NO_BATCH = (
    "optimizer.step() was called without a batch from the loader that was prepared: train on each batch before you ask for the next, "
    f"{HINT}"
)
OUTSIDE = (
    "a step was made outside of the loop over the prepared loader, as on next(iter(loader)), on what itertools.cycle or a list has kept, or on a "
    "DataLoader made anew: loop over the loader that elastic.prepare() has returned in each epoch, train on each batch within that loop, "
    f"{HINT}"
)
GRADIENT_OF_PART = (
    "torch.autograd.grad() by a parameter that is trained, as for GradNorm or MAML, gives the gradient of this worker's part of a batch, and the workers "
    "do not sum it: call loss.backward(), and look at parameter.grad after it"
)
# Who stood where a worker was told that the job stands.
NOBODY_IS_LEFT = "this worker has passed by batches that nobody who is left has trained on: it is started again"
ORDERS = ("random_", "randperm", "randint", "multinomial")  # by which samplers draw

P = ParamSpec("P")
Result = TypeVar("Result")


class Keeper(Protocol):
    fault: Exception | None  # that ends training
    job: Any


KeeperT = TypeVar("KeeperT", bound=Keeper)


def lasting(method: Callable[Concatenate[KeeperT, P], Result]) -> Callable[Concatenate[KeeperT, P], Result]:
    """Once it has said that training can't go on, it says so again: a script may swallow any exception, and go on."""

    @functools.wraps(method)
    def wrapped(self: KeeperT, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        if self.fault is not None:
            raise self.fault
        try:  # and not `kept`, as this is called several times a step
            return method(self, *args, **kwargs)
        except Exception as error:
            _keep(self, error)
            raise

    return wrapped


@contextlib.contextmanager
def kept(keeper: Keeper) -> Iterator[None]:
    """As `lasting`, of what is done within."""
    try:
        yield
    except Exception as error:
        _keep(keeper, error)
        raise


def _keep(keeper: Keeper, error: Exception) -> None:
    if isinstance(error, ElasticDLError) or error is keeper.job.failure:
        keeper.fault = error


def require_backward(*, has_batch: bool, has_stepped: bool, is_reduced: bool, looked_at: str) -> None:
    """The script calls ``loss.backward()``. ``has_stepped``: an optimizer, on the batches in hand. ``is_reduced``: their gradients are
    summed. ``looked_at``: for the script has looked at them there.

    Raises:
        UserError: where there is no sum to which its gradients could be added.
    """
    if not has_batch:
        raise UserError(
            "loss.backward() was called again after optimizer.step() on the same batch: expected one step for each batch, or "
            "for several"
        )
    if has_stepped:
        raise UserError(
            "loss.backward() was called after an optimizer's step() on the same batch, and before another's, as for a GAN: a plain "
            "loop has one sum of gradients for each batch. Make all backward passes before the first step, or take Lightning's manual "
            "optimization"
        )
    if is_reduced:
        raise UserError(
            f"gradients were looked at ({looked_at}, perhaps by the step of an optimizer that elastic.prepare() was not given) between two "
            "backward passes of one step, where they are not complete: look at them after the last"
        )


def ended_on_stand_ins(epoch: int, jobs_epoch: int) -> str:
    """Of a worker that has come later, and judged batches that are none."""
    return (
        f"this worker has come later, and its script has left its loop in epoch {epoch}, where the job stands in epoch "
        f"{jobs_epoch}: what is computed while elastic.catching_up() says nothing of the model, so decide only when that is False, "
        "and give elastic.prepare() what the decision goes by, as an object with state_dict"
    )


DROPS_GRADIENTS = (
    "the gradient of a batch was dropped that waits for the rest of its global batch: call optimizer.zero_grad(), which knows of it, and not "
    "model.zero_grad()"
)


STEP_IN_HOOK = (
    "an epoch has passed without optimizer.step() in the loop, and parameters have hooks (register_post_accumulate_grad_hook): these are called once "
    "gradients are summed, which is at the step, so they can't make it: call optimizer.step() in the loop"
)

OTHER_THREAD = (
    "the prepared loader is looped over in another thread than the one that trains, as by a background generator: workers come and go "
    "between two batches, so loop over it where optimizer.step() is called. The loader's own processes load ahead (num_workers)"
)


COPIED_ON_ITS_WAY = (
    "the loop calls a copy of the model that this worker has made while it was catching up, when the model had not got the job's "
    "parameters: make the copy before elastic.prepare(), give it along, and set it by load_state_dict()"
)

OTHER_ORDER = (
    "another loader than the prepared one draws the order of its samples within the loop, where each worker draws its own random numbers: "
    "give that loader generator=torch.Generator().manual_seed(0), with which all workers load the same"
)


def place_in_script(what: str) -> str:
    """``FILE:LINE: WHAT``, of the nearest frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_foreign(frame):
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{place}: {what}" if what else place


def _is_foreign(frame: FrameType) -> bool:
    """No code of the script's."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "elasticdl")


class SecondPass:
    """Of the script's loop, through the batches of a torn step; it comes next."""

    def __init__(self, step: int, end: int, why: Exception) -> None:
        """``step``: that was made last. ``end``: the number of the batch that comes after this one's."""
        self.end = end
        cause = str(why) if isinstance(why, ElasticDLError) else one_line(why)
        self._what = f"step {step + 1} was torn, and was made by another pass through the script's loop ({cause})"
        self._before, _ = _held_by_script()

    def told(self) -> str:
        """What of the script shows, when this pass is over, that there were two; empty if nothing does."""
        now, added = _held_by_script()
        counts = [name for name, value in now.items() if type(value) is int or (type(value) is float and name in added)]
        counted = [name for name in counts if now[name] > self._before.get(name, now[name])]
        drawn = [name for name, value in now.items() if isinstance(value, Iterator)]
        told = [f"; counted twice: {', '.join(counted)}"] * bool(counted)
        told += [f"; drawn from twice: {', '.join(drawn)}"] * bool(drawn)
        return self._what + "".join(told) if told else ""


def _held_by_script() -> tuple[dict[str, Any], set[str]]:
    """Of the function that loops over the batches: numbers, also of its objects, and iterators; and the names to which it adds something."""
    frame = sys._getframe()
    while frame.f_back is not None and (_is_foreign(frame) or frame.f_code.co_flags & inspect.CO_GENERATOR):
        frame = frame.f_back  # a generator is around the loader, such as a progress bar
    held = {**frame.f_globals, **frame.f_locals}
    for name, each in list(held.items()):
        kind: Any = type(each)
        if is_scripts_own(kind):
            held.update({f"{name}.{key}": value for key, value in getattr(each, "__dict__", {}).items()})
    steps = pairwise(dis.get_instructions(frame.f_code))
    added = {name.argval for add, name in steps if add.opname == "BINARY_OP" and add.argrepr == "+="}
    held = {name: each for name, each in held.items() if isinstance(each, (int, float, Iterator))}
    # A generator that runs is the loop over the batches itself.
    return {
        n: v for n, v in held.items() if not isinstance(v, io.IOBase) and not getattr(v, "gi_running", False)
    }, added


def left_out_by_size(place: str, whole: int, mine: int) -> str:
    """``whole``: samples of a batch, of which ``mine`` are this worker's."""
    return (
        f"{place}: the script looks at the size of a batch and leaves the batch out: this worker's part has {mine} of its {whole} samples, "
        "as there are several workers. Give the loader drop_last=True to leave out what is not full, or look at the size after "
        "loss.backward()"
    )


def works_on_another_batch(place: str) -> str:
    return (
        f"{place}: the script works on a batch after the next one was given, as with a prefetcher: workers come and go between two batches, so "
        "ask for the next batch after optimizer.step(). The loader's own processes load ahead (num_workers)"
    )


def require_own(given: Any, kept: Container[int]) -> None:
    """The model is called with this. ``kept``: storages of what was computed on the way.

    Raises:
        UserError: some of it is from there.
    """
    if any(isinstance(leaf, torch.Tensor) and storage_of(leaf) in kept for leaf in leaves_of(given)):
        raise UserError(
            "the model is called with what it has answered to a batch before, as with the hidden state of an RNN, and this worker has come "
            "between the two: it can come where that begins anew, at the begin of an epoch"
        )


def require_one_order(generator: torch.Generator | None, module: str) -> None:
    """One of `ORDERS` is called, with ``generator``, by ``module``.

    Raises:
        UserError: what each worker draws by itself is an order of samples.
    """
    if generator is None and module == "torch.utils.data.sampler" and torch.is_grad_enabled():
        raise UserError(OTHER_ORDER)
