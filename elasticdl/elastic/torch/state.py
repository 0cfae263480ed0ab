"""The training state of a PyTorch model.

Beside progress and the user's own values, a commit copies only what the forward pass itself changes (buffers, as the
running statistics of batch norm).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.lifecycle import WorkerState
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import NOISE_STEPS, Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.torch.collective import broadcast_state
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.flat import host_array
from elasticdl.elastic.torch.reducer import GradientReducer
from elasticdl.elastic.torch.sampler import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.training import state
from elasticdl.elastic.training.state import UNCHANGING, copied
from elasticdl.elastic.training.state_check import Pieces, leaves


class TorchState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`.

    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    _remedy = "call batch.backward(loss) exactly once for each micro-batch"
    _dump_to = staticmethod(torch.save)
    _load_from = staticmethod(partial(torch.load, map_location="cpu", weights_only=False))
    sampler: ElasticSampler | None
    _job: ElasticContext

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ElasticDataLoader | ElasticSampler | None,
        values: dict[str, Any],
        *,
        snapshot: bool = False,
    ) -> None:
        """``data``: what tells where training stands in the data set. ``snapshot``: copy parameters and optimizer slots
        at each commit as well, for a loop that changes them otherwise than by ``optimizer.step()``."""
        sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        super().__init__(job, sampler, values, snapshot=snapshot)
        self.model = model
        self.optimizer = optimizer
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self._buffers = list(model.buffers())
        self._own_rates: list[float] = []  # of the parameter groups, to which rules apply
        self._reducer = GradientReducer(self._parameters, self._buffers, job.collective)
        if sampler is not None:
            sampler.attach(self._reducer, self._reduce)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._step_made())
        self._saved["buffers"] = [buffer.clone() for buffer in self._buffers]
        self.save(p.Part.AT_COMMIT)

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sync(self, world: World) -> None:
        scheduled = any("initial_lr" in group for group in self.optimizer.param_groups)  # a scheduler leaves that mark
        optimizers = [getattr(value, "optimizer", None) for value in self.values.values()]
        wrapped = [getattr(each, "optimizer", None) for each in optimizers]  # as by accelerate
        held = any(each is self.optimizer for each in (*optimizers, *wrapped))
        if scheduled and not held and self.rate is None and world.is_first and world.rank == 0:
            self._job.warn(
                "a scheduler sets the optimizer's learning rate and is not part of the state: a newcomer begins with it anew; "
                "give it along, as in TorchState(scheduler=scheduler)"
            )
        super().sync(world)

    def reduce_gradients(self) -> None:
        """Sum the gradients of all workers now, for what needs them before ``optimizer.step()``: clipping, a GradScaler.

        Nothing is left to do after `StepBatch.backward` of this worker's last micro-batch.

        Raises:
            UserError: the workers train different parameters.
            WorldBroken: the step is torn; parameters are untouched.
        """
        self._reduce(None)

    def cast_end_vote(self) -> Vote:
        return self._reducer.end()

    # -- around optimizer.step() --

    def _before_step(self, *_: Any) -> None:
        self.reduce_gradients()
        self._before_update()

    def _reduce(self, backward: Callable[[], object] | None) -> None:
        """``backward`` makes the last gradients of this step; None if they are there."""
        if self._job.session.core.state is WorkerState.REDUCED:
            if backward is not None:
                raise UserError(f"the gradients of this step are reduced already: {self._remedy}")
            return
        batch = self.sampler.current if self.sampler is not None else None
        part = 1 / self._job.world.size
        self._reducer.cast(
            leaving=self._job.leaving,
            stopping=self._wants_to_stop,
            share=batch.share if batch else part,
            batch=batch.plan.checksum if batch else 0,
            state=self._check.checksum,
        )
        if batch and self._measures_noise:
            self._reducer.measure_noise(self._job.policy.batch_size(self._job.world.size))
        if backward is not None:
            with self._reducer.launching():
                backward()
        self._job.advance(Activity.WAIT)
        vote = self._reducer.reduce(1.0 if batch else part)
        self._voted(vote, self._reducer.passes.seconds)

    @property
    def _measures_noise(self) -> bool:
        """What more workers are worth depends on it only where they make the batch larger."""
        return not self._job.policy.fixed and self.progress.step % NOISE_STEPS == 0

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    # -- the parts of a state --

    def _own_rate(self) -> float:
        # Kept in each group as torch's schedulers do: it may come from a checkpoint.
        groups = self.optimizer.param_groups
        self._own_rates = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]
        return self._own_rates[0]

    def _set_rate(self, rate: float) -> None:
        """Of several parameter groups the first has it, and the others keep their ratio to it."""
        groups = self.optimizer.param_groups
        for group in groups[len(self._own_rates) :]:  # added since
            self._own_rates.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        first = self._own_rates[0]
        for group, own in zip(groups, self._own_rates, strict=True):
            value = rate if own == first or not first else own * (rate / first)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _dump_own(self) -> dict[str, Any]:
        """Tensors by reference."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load_own(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self._job.device.type != "cpu":
            self.optimizer.state.clear()  # else the old slots and the new ones are on the device at once
        self.optimizer.load_state_dict(state["optimizer"])

    def _pieces(self) -> Pieces:
        model: dict[str, Any] = {f"model.{name}": each for name, each in self.model.state_dict().items()}
        optimizer = dict(leaves("optimizer", self.optimizer.state_dict()))
        return {name: host_array(each) for name, each in {**model, **optimizer}.items()}

    def _dump_settings(self) -> list[dict[str, Any]]:
        """Of each parameter group."""
        return [
            {
                key: value if type(value) in UNCHANGING else copy.deepcopy(value)
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def _load_settings(self, settings: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.optimizer.param_groups, settings, strict=False):  # one may have been added since
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a scheduler, or a compiled step, may hold on to it
                else:
                    group[key] = value

    def _restore_own(self) -> None:
        with torch.no_grad():
            for buffer, saved in zip(self._buffers, self._saved["buffers"], strict=True):
                buffer.copy_(saved)
        if self._snapshot:
            self.model.load_state_dict(self._saved["model"])
            self.optimizer.load_state_dict(copy.deepcopy(self._saved["optimizer"]))

    def _broadcast(self) -> dict[str, Any]:
        received: dict[str, Any] = broadcast_state(self.state_dict(), self._job.collective, self._job.device)
        return received

    def save(self, part: p.Part) -> None:
        super().save(part)
        if self._snapshot and part is p.Part.AT_COMMIT:
            self._saved["model"] = copied(self.model.state_dict(), self._saved.get("model"), self._copy_tensor)
            optimizer = self.optimizer.state_dict()
            self._saved["optimizer"] = copied(optimizer, self._saved.get("optimizer"), self._copy_tensor)
        if self._snapshot or part is p.Part.WITH_PARAMETERS:
            with torch.no_grad():
                for saved, buffer in zip(self._saved["buffers"], self._buffers, strict=True):
                    saved.copy_(buffer)

    def _copy_tensor(self, value: Any, before: Any) -> torch.Tensor | None:
        if not _is_whole(value):
            return None
        alike = _is_whole(before) and (before.shape, before.dtype) == (value.shape, value.dtype)
        made: torch.Tensor = before if alike and before.device == value.device else torch.empty_like(value)
        with torch.no_grad():
            return made.copy_(value)


def _is_whole(value: Any) -> bool:
    """A plain tensor that shares its memory with no other."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
