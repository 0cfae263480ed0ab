"""What a script has registered on parameters that are trained: it is called on the gradient of the global batch.

A backward pass of this worker's makes a part of that gradient only, weighed. A hook that clips, or scales by a norm, would make
another sum of such parts. So hooks rest while passes are made, and are called in their order once the sum is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from elasticdl.elastic.torch_kit import gpu
from elasticdl.elastic.training import cursor
from elasticdl.elastic.training.seeds import kept_streams

ON_GRADIENT, AFTER = "on gradients", "after they are accumulated"  # kinds, as torch has them
EVERYBODY = -1  # in the place of a rank, where all workers draw alike


class ParameterHooks:
    """Those of some parameters."""

    def __init__(self, parameters: Callable[[], Iterable[torch.nn.Parameter]], *, rest: bool = True) -> None:
        """``rest``: while passes are made. Otherwise a pass makes the whole gradient, and calls them itself."""
        self._parameters = parameters
        self._rest = rest
        self._resting: list[tuple[dict[int, Any], int, Any]] = []  # where each belongs, by its number there
        self._has_warned = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within, backward passes call none of them."""
        self.lay_aside()
        try:
            yield
        finally:
            self.put_back()

    def lay_aside(self) -> None:
        """Until `put_back`. Each leaves something in its place, so that its handle can remove it meanwhile."""
        self.put_back()
        if self._rest:
            for _, kind, hooks in self._found():
                for number, hook in _of_script(hooks):
                    self._resting.append((hooks, number, hook))
                    hooks[number] = _resting_after if kind is AFTER else _resting_on_gradient

    def put_back(self) -> None:
        resting, self._resting = self._resting, []
        for hooks, number, hook in resting:
            if number in hooks:
                hooks[number] = hook

    def call(self, seed: Callable[[], int]) -> None:
        """On the gradients of the global batch, which are there. ``seed``: the same on all workers, of what the hooks draw."""
        self.put_back()
        found = [(each, kind, _of_script(hooks)) for each, kind, hooks in self._found()] if self._rest else []
        if not any(hooks for _, _, hooks in found):
            return
        with _drawing_alike(seed()), torch.no_grad():
            for parameter, kind, hooks in found:
                for _, hook in hooks:
                    if parameter.grad is None:
                        break
                    result = hook(parameter if kind is AFTER else parameter.grad)
                    if kind is ON_GRADIENT and result is not None:
                        parameter.grad = result

    @property
    def may_step(self) -> bool:
        """Whether there are some that an optimizer may step in, once a gradient is accumulated."""
        return self._rest and any(kind is AFTER and _of_script(hooks) for _, kind, hooks in self._found())

    def require_one_pass(self, passes: int, warn: Callable[[str], None]) -> None:
        """Tell once if the gradients of a step were made in several passes of the script."""
        if passes > 1 and self._rest and not self._has_warned and any(_of_script(hooks) for *_, hooks in self._found()):
            self._has_warned = True
            warn(
                f"a hook on a parameter (register_hook) is called once a step, with the sum of its {passes} backward passes: a mask or a factor "
                "is right so; to clip, call clip_grad_value_ or clip_grad_norm_ before optimizer.step() instead"
            )

    def _found(self) -> Iterator[tuple[torch.nn.Parameter, str, dict[int, Any]]]:
        for parameter in self._parameters():  # mostly without any, which is to be seen soon
            if hooks := parameter._backward_hooks:
                yield parameter, ON_GRADIENT, hooks
            if (hooks := parameter._post_accumulate_grad_hooks) and {*map(type, hooks.values())} != OWN:
                yield parameter, AFTER, hooks


class OwnHook:
    """One of ours, which sees when a gradient is there: it does not rest."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        self._see = see

    def __call__(self, parameter: torch.Tensor) -> None:
        self._see(parameter)


OWN = {OwnHook}


def _of_script(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    return [(number, hook) for number, hook in hooks.items() if type(hook) is not OwnHook]


def _resting_on_gradient(gradient: torch.Tensor) -> None: ...


def _resting_after(parameter: torch.Tensor) -> None: ...


@contextlib.contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """Within, the global generators give the same on all workers; afterwards each goes on with its own."""
    devices = range(gpu.count_gpus()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with kept_streams(), torch.random.fork_rng(devices=devices):
        cursor.seed_generators(seed)
        torch.default_generator.manual_seed(seed)
        gpu.seed_generators(seed)
        yield
