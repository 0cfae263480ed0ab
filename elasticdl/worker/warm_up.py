"""A forward and a backward pass before the worker joins, so that the others need not wait for what is slow once."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of
from elasticdl.elastic.torch.device import to_device
from elasticdl.worker.first_samples import Attempt, Blame
from elasticdl.worker.torch_evaluation import evaluating

Loss = Callable[[Any, Any], torch.Tensor]


def warm_up(model: torch.nn.Module, loss: Loss, dataset: Any, samples: int, device: torch.device) -> None:
    """Run the first samples through the model and back; afterwards nothing is different from before.

    Raises:
        UserError: the loss is no scalar.
        Exception: whatever the user's code raises.
    """
    with untouched(model):
        inputs, labels = to_device(_first(dataset, samples), device)
        value = scalar(loss, labels, model(inputs))
        value.backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def scalar(loss: Loss, labels: Any, outputs: Any) -> torch.Tensor:
    """The value of a loss.

    Raises:
        UserError: it is no scalar.
        Exception: whatever the user's code raises.
    """
    value = loss(labels, outputs)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserError(
            f"{name_of(loss)}(labels, predictions) returned {found}; expected a scalar tensor: the mean over the samples"
        )
    return value


def try_out(model: torch.nn.Module, loss: Loss, dataset: Any, where: Blame) -> Attempt:
    """For `require_fit`: a forward pass on the model's own device, after which nothing is different from before."""

    def attempt(samples: int, training: bool) -> None:
        with untouched(model), contextlib.nullcontext() if training else evaluating(model):
            where.run(lambda: _first(dataset, samples), model, functools.partial(scalar, loss))

    return attempt


def _first(dataset: Any, samples: int) -> Any:
    return default_collate([dataset[index] for index in range(samples)])


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Buffers, gradients and the state of all random generators are put back at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
