"""PyTorch for a job: tensors as views into flat memory, on a GPU, as numbers, and as the engines take them; random streams; the process's own job.

What knows a model, an optimizer or a step stands in the files that use this one; here is what each of them needs of PyTorch, and the guard
against an optimizer that steps by itself while this process trains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticdl.common.credentials import PROCESS
from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.collectives.port import Bytes, Collective
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.torch_kit.refusals import each_of
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.pieces import Array, Marks, as_array, mark
from elasticdl.elastic.training.runtime import SEED, ScriptRuntime

TensorT = TypeVar("TensorT", bound=torch.Tensor)
Kind = tuple[torch.dtype, torch.device]
# What is here of a tensor that the processes of one worker share, a `torch.distributed.tensor.DTensor`. Summed with its equals in the other workers,
# sent to them and compared with theirs is what this process has of it.


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def is_sharded_in_passes(module: torch.nn.Module) -> bool:
    """Whether it holds other parameters within passes, as FSDP2 has it."""
    return hasattr(module, "unshard")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What is here of a tensor, without its history."""
    if not is_sharded(tensor):
        return tensor
    whole: Any = tensor.detach()
    found: torch.Tensor = whole.to_local()
    return found


def like(present: torch.Tensor, value: torch.Tensor, placements: Sequence[Any] | None = None) -> torch.Tensor:
    """``value``, what is here of a tensor, as one that is sharded as the present one is, if that is. ``placements``: if it is otherwise."""
    if not is_sharded(present) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor

    whole: Any = present
    shape = {"shape": whole.shape, "stride": whole.stride()}
    made: torch.Tensor = DTensor.from_local(
        value, whole.device_mesh, placements or whole.placements, run_check=False, **shape
    )
    return made


def settled(parameter: Any, gradient: Any) -> Any:
    """The gradient, as much of it as the parameter has here: that of a tensor-parallel embedding may be whole in each process. Cutting takes no
    collective."""
    if is_sharded(gradient) and local(gradient).shape != local(parameter).shape:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


# Tensors as views into flat memory, and as arrays of the host.

# Views start at multiples of this many elements, so that vectorised kernels meet aligned memory.
ALIGNMENT = 16
_WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}  # what NumPy does not know, without loss


def by_kind(tensors: Iterable[TensorT]) -> dict[Kind, list[TensorT]]:
    kinds: dict[Kind, list[TensorT]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds


def aligned(tensor: torch.Tensor) -> int:
    """Elements that it takes in flat memory."""
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of a copy that keeps its memory format: its own if it fills its memory, in whatever order, else a contiguous one's."""
    own = tensor.stride()
    if torch.empty_like(tensor, device="meta").stride() == own:
        return own
    return torch.empty(tensor.shape, device="meta").stride()


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as flat memory, which has them by `strides_of`; a copy only if it has gaps."""
    if tensor.stride() != strides_of(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_views(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Zeroed flat memory for tensors of one kind, and for each of them a view of its shape."""
    sizes = [aligned(tensor) for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    starts = accumulate(sizes, initial=0)
    return flat, [
        flat[start : start + tensor.numel()].view(tensor.shape) for tensor, start in zip(tensors, starts, strict=False)
    ]


def host_array(value: Any) -> Array:
    """A tensor's numbers on the host, of a type that NumPy knows; what is no tensor as `as_array` has it."""
    if not isinstance(value, torch.Tensor):
        return as_array(value)
    tensor = local(value.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype in _WIDER:
        tensor = tensor.to(_WIDER[tensor.dtype])
    elif tensor.is_floating_point() and tensor.itemsize < 2:  # eight bits in one of several ways
        tensor = tensor.float()
    array: Array = tensor.cpu().numpy()
    return array


# All that is done with a GPU beside the model's own arithmetic. Nothing else in PyTorch's kit uses `torch.cuda`.
#
# The host never waits for the device but at an event. What leaves the device goes through pinned memory, on a stream of its
# own, so that the stream on which the model computes goes on.

GPU = "cuda"


# -- which device --


def choose_device() -> torch.device:
    """The GPU that the launcher made visible, or the CPU. The processes of a worker see all that this has, and each takes one."""
    number = int(os.environ.get(PROCESS, 0))
    return torch.device(GPU, number) if torch.cuda.is_available() else torch.device("cpu")


def count_gpus() -> int:
    """Those that this process sees."""
    return torch.cuda.device_count()


def wait_for(device: torch.device) -> None:
    """Until all that the device was told to do is done."""
    if device.type == GPU:
        torch.cuda.synchronize(device)


class PassTimer:
    """How long the passes of a step take by the device's clock. On a CPU, which has none of its own: 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = None  # events

    def begin(self) -> None:
        self._begin, self._end = self._mark(), None

    def end(self) -> None:
        """All passes were handed to the device."""
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        """0 if the device is not through yet: it is not waited for."""
        if self._begin is None or self._end is None or not self._end.query():
            return 0.0
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != GPU:
            return None
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


# -- from the device to the host --


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostCopy:
    """A tensor's contents on their way to the host: on a GPU through pinned memory and ``stream``, while the host goes on.

    It keeps the tensor: its memory must not be used for another while it is read.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """``stream``: None for the present one, behind which the copy is made then."""
        self._source, self._event = tensor, None
        if tensor.device.type != GPU:
            self.host = tensor.to("cpu", copy=True)
            return
        present = torch.cuda.current_stream(tensor.device)
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = stream or present
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
            self._event = stream.record_event(_new_event())

    def wait(self) -> torch.Tensor:
        """What the tensor held when the copy was begun."""
        if self._event is not None:
            self._event.synchronize()
        return self.host


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else who waits for it spins


# A number that stands for a tensor's bits, computed where the tensor is: a sum of its words with weights, by 2**64, which is the same in
# whatever order a device adds.

# A plain sum of words says nothing of their order, so the words of each column have a weight. That the columns are a prime number
# keeps the rows of a matrix from being taken for one another.
COLUMNS = 1021
WEIGHTS: Array = (np.random.PCG64(0).random_raw(COLUMNS) | np.uint64(1)).view(np.int64)
WORD = 8  # bytes
_UNSIGNED = (1 << 64) - 1


def marks_of(tensors: Sequence[Any]) -> Marks:
    """From a device comes one small copy, for which the host waits only when it asks for the marks."""
    on_devices: dict[torch.device, list[int]] = {}
    made: list[int] = [0] * len(tensors)
    for number, each in enumerate(tensors):
        if is_lazy(each):
            continue
        if isinstance(each, torch.Tensor):
            on_devices.setdefault(each.device, []).append(number)
        else:
            made[number] = mark(np.asarray(each))
    copies = {device: HostCopy(device_marks([tensors[i] for i in found])) for device, found in on_devices.items()}

    def wait() -> list[int]:
        for device, numbers in on_devices.items():
            for number, each in zip(numbers, copies[device].wait().tolist(), strict=True):
                made[number] = each & _UNSIGNED
        return made

    return wait


@torch.no_grad()
def device_marks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of tensors of one device, there."""
    weights = torch.from_numpy(WEIGHTS).to(tensors[0].device)
    return torch.stack([_device_mark(_bits(each), weights) for each in tensors])


def _device_mark(raw: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    whole = len(raw) // WORD * WORD
    if raw.storage_offset() % WORD:  # a view of words must begin with one
        raw = raw.clone()
    words = raw[:whole].view(torch.int64)
    square = len(words) // COLUMNS * COLUMNS
    total = torch.tensor(len(raw), device=raw.device)
    if square:
        total = total + (words[:square].view(-1, COLUMNS).sum(0) * weights).sum()
    rest, tail = words[square:], raw[whole:].long()
    return total + (rest * weights[: len(rest)]).sum() + (tail * weights[COLUMNS - len(tail) :]).sum()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, in the order of its elements."""
    tensor = local(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8)


# PyTorch's tensors, on any device, for the engines of `elasticdl.elastic.collectives`.

_Description = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]  # shape, strides, type, whether on the device


class TorchTensors:
    title, horovod, kind = "PyTorch", "horovod.torch", torch.Tensor
    lends_gpu_memory = True

    def __init__(self) -> None:
        self._device = choose_device()
        self._stream: torch.cuda.Stream | None = None  # for what is copied to the host

    @property
    def has_gpu(self) -> bool:
        return self._device.type != "cpu"

    def operations(self, module: ModuleType, *, on_gpu: bool) -> Any:
        return module

    def lend(self, tensor: Any, *, natively: bool) -> torch.Tensor:
        lent = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else _real(tensor).contiguous()
        # Which Horovod does not know in PyTorch.
        return lent.float() if natively and lent.dtype == torch.bfloat16 else lent

    def to_host(self, lent: torch.Tensor) -> torch.Tensor:
        if lent.device.type == "cpu":
            return lent
        self._stream = self._stream or new_stream(lent.device)
        return HostCopy(lent, self._stream).wait()

    def summed(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        target = _real(tensor)
        if result.data_ptr() != target.data_ptr():  # the engine has worked on a copy
            target.copy_(result, non_blocking=True)
        return tensor

    def size(self, tensor: torch.Tensor) -> int:
        return local(tensor).numel() * tensor.element_size()

    def describe(self, tensor: torch.Tensor, *, on_host: bool) -> _Description:
        tensor = local(tensor)
        return tuple(tensor.shape), strides_of(tensor), tensor.dtype, not on_host and tensor.device.type != "cpu"

    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        return in_memory_order(local(tensor.detach())).view(torch.uint8)

    def read(self, content: torch.Tensor, cut: slice) -> Bytes:
        read: Bytes = self.to_host(content[cut]).numpy()
        return read

    def from_bytes(self, content: Bytes, description: _Description) -> torch.Tensor:
        shape, strides, dtype, on_device = description
        # PyTorch does not take an empty array for one of another type.
        flat = torch.from_numpy(content).view(dtype) if len(content) else torch.empty(0, dtype=dtype)
        tensor = flat.as_strided(shape, strides)
        return tensor.to(self._device) if on_device else tensor


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: neither Horovod nor NCCL knows them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# The random streams of a process: the global generators of Python, NumPy and PyTorch, also on GPUs.

Streams = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    # Not torch.manual_seed: for each kind of device that is not in use it formats a stack trace, a millisecond a step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def streams() -> Streams:
    """Their states, for this process; `RandomStreams.capture` is for others, and takes longer."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu_states()


def restore_streams(captured: Streams) -> None:
    pythons, numpys, torchs, on_gpus = captured
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)
    restore_gpu_states(on_gpus)


def gpu_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def restore_gpu_states(on_gpus: list[torch.Tensor]) -> None:
    if on_gpus:  # to count GPUs takes a quarter of a millisecond where there are none
        for device, state in enumerate(on_gpus[: count_gpus()]):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def streams_apart() -> Iterator[None]:
    """Within, the generators are anybody's; afterwards they are as before.

    Only the second of a pair of `numpy.random.randn` is forgotten, if the first was drawn before.
    """
    numpys, spare = mtrand.get_bit_generator(), _spare_generator()
    if numpys is spare:  # within another one
        before = streams()
        try:
            yield
        finally:
            restore_streams(before)
        return
    # To exchange NumPy's generator takes a microsecond, and to read and to write its state fifty, several times a step.
    pythons, torchs, on_gpus = random.getstate(), torch.get_rng_state(), gpu_states()
    mtrand.set_bit_generator(spare)
    try:
        yield
    finally:
        mtrand.set_bit_generator(numpys)
        random.setstate(pythons)
        torch.set_rng_state(torchs)
        restore_gpu_states(on_gpus)


@functools.cache
def _spare_generator() -> np.random.BitGenerator:
    return np.random.MT19937(0)


class RandomStreams:
    """The global generators of Python, NumPy and torch on the host, as one value that travels."""

    @staticmethod
    def capture() -> bytes:
        pythons, numpys, torchs, _ = streams()
        return pickle.dumps((pythons, numpys, torchs.numpy().tobytes()))

    @staticmethod
    def compared(captured: bytes) -> dict[str, Any]:
        """As arrays, for `elasticdl.elastic.training.pieces.Piece.compared`."""
        pythons, numpys, torchs = pickle.loads(captured)
        states = {
            "python": np.array(pythons[1], np.int64),
            "numpy": np.append(numpys[1].astype(np.int64), numpys[2:4]),
            "torch": np.frombuffer(torchs, np.uint8),
        }
        return {"random": states}

    @staticmethod
    def restore(captured: bytes) -> None:
        pythons, numpys, torchs = pickle.loads(captured)
        restore_streams((pythons, numpys, torch.frombuffer(bytearray(torchs), dtype=torch.uint8), []))


LEAST_DRAWN = 2**32  # of what torch itself draws at its start, of 64 bits; people give less, as NumPy takes no more


def seed_torch(seed: int) -> None:
    """Unless the script has done so."""
    present = torch.initial_seed()
    if present == SEED or present >= LEAST_DRAWN:
        torch.manual_seed(seed)


# Optimizers that step where they must not.

Look = Callable[[torch.optim.Optimizer], None]

_of_thread = threading.local()  # each worker's, where several are threads of a process


def look_before_steps(purpose: str, look: Look | None) -> None:
    """Have ``look`` called before each step of any optimizer, which it may refuse. None: nothing looks for this purpose any more."""
    _hook_steps()
    looks = _of_thread.__dict__
    looks.pop(purpose, None)
    if look is not None:
        looks[purpose] = look


@functools.cache
def _hook_steps() -> None:
    """Once in a process."""

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # it would be traced
            for look in list(_of_thread.__dict__.values()):
                look(optimizer)

    register_optimizer_step_pre_hook(before_step)


def refuse_others(given: Any, is_in_batch: Callable[[], bool], remedy: str) -> None:
    """From here on refuse all optimizers but the ``given`` ones while a batch is trained on: the workers do not sum the gradients of their parameters."""
    known = each_of(given)

    def look(optimizer: torch.optim.Optimizer) -> None:
        if not is_in_batch() or any(optimizer is each for each in known):
            return
        groups = {id(group) for each in known for group in each.param_groups}
        if groups.issuperset(map(id, optimizer.param_groups)):
            return  # one within another, which steps the parameters by the groups of that one
        raise UserError(
            f"{type(optimizer).__name__} steps while a batch is trained on, and was not given before: the workers do not sum its gradients, and who comes "
            f"later has none of its state. Make it at the beginning, and {remedy}; set param_groups to change a rate"
        )

    look_before_steps("others", look)


# One process's part in a job that trains with PyTorch.

FORBIDDEN = "forbidden steps"


class ElasticContext(JobContext):
    """What a training script holds of its job. Make it with `connect`, and `close` it."""

    divides_batches = True  # as there is no `fit`
    takes_processes = True

    def __init__(self, session: Session, collective: Collective, policy: BatchPolicy, seed: int) -> None:
        super().__init__(session, collective, policy, seed)
        self.device = choose_device()

    def forbid_steps(self, why: str) -> None:
        def refuse(*_: Any) -> NoReturn:
            raise UserError(why)

        look_before_steps(FORBIDDEN, refuse)

    def allow_steps(self) -> None:
        look_before_steps(FORBIDDEN, None)

    @classmethod
    def _open_collective(cls, endpoint: Endpoint | None, engine: str) -> Collective:
        return open_collective(endpoint, engine, TorchTensors())


own = ScriptRuntime(ElasticContext, seed_torch, count_gpus)  # the job that a script of one's own takes part in


def sum_of_all(job: ElasticContext, *mine: float) -> list[float]:
    """The sums over all workers, for `elastic.mean`.

    Raises:
        WorldBroken: a worker is lost.
    """
    total = torch.tensor(mine, dtype=torch.float64) * float(job.spread.counts)
    with job.waiting():
        job.collective.sum_asked(total, "elastic.mean()")
        return job.inside.sum(total.tolist())
