"""In which state a model was called, so that it can be called so again, when the script has gone on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from elasticdl.common.errors import ElasticDLError
from elasticdl.elastic.torch_kit.reduction.named import modules_of

_PLAIN = (bool, int, float, str, type(None))


class OtherParameters(ElasticDLError):
    """The model has not those parameters now."""


class Modes:
    """Of a model and its modules: whether they train, what numbers the script's own ones hold, and which parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = modules_of([model])
        self._training = [each.training for each in self._modules]
        self.trains = any(self._training)
        self._numbers = [(each, _numbers_of(each)) for each in self._modules if not _is_of_torch(each)]
        self._parameters = self._present_parameters()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, the model is as it was; afterwards as it is now.

        Raises:
            OtherParameters: it was called with others than its own.
        """
        if self._present_parameters() != self._parameters:
            raise OtherParameters(
                "the model was called with other parameters than its own, as by torch.func.functional_call"
            )
        training = [each.training for each in self._modules]
        numbers = [(each, _numbers_of(each)) for each, _ in self._numbers]
        self._put(self._training, self._numbers)
        try:
            yield
        finally:
            self._put(training, numbers)

    def _put(self, training: list[bool], numbers: list[tuple[torch.nn.Module, dict[str, Any]]]) -> None:
        for module, value in zip(self._modules, training, strict=True):
            if module.training != value:
                module.training = value
        for module, values in numbers:
            vars(module).update(values)

    def _present_parameters(self) -> list[int]:
        return [id(parameter) for module in self._modules for parameter in module._parameters.values()]


def _is_of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _numbers_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
