"""The training state of a PyTorch model.

Beside progress and the user's own values, a commit copies only what the forward pass itself changes (buffers, as the
running statistics of batch norm).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.agreement import plain_text
from elasticdl.elastic.core.plan import step_seed
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import NOISE_STEPS, Vote
from elasticdl.elastic.core.world import World
from elasticdl.elastic.torch_kit.data.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.flat import host_array
from elasticdl.elastic.torch_kit.pieces.further import IS_OUTSIDE, further_modules
from elasticdl.elastic.torch_kit.pieces.groups import dump_groups, load_groups
from elasticdl.elastic.torch_kit.pieces.marks import marks_of
from elasticdl.elastic.torch_kit.pieces.model_attributes import Attributes
from elasticdl.elastic.torch_kit.pieces.optimizers import each_of, is_other_kind, require_summable
from elasticdl.elastic.torch_kit.pieces.outside import dump_outside, load_outside, outside_parameters
from elasticdl.elastic.torch_kit.reduction.buffers import least_samples
from elasticdl.elastic.torch_kit.reduction.gradients import WeighedGradients
from elasticdl.elastic.torch_kit.reduction.hooks import EVERYBODY
from elasticdl.elastic.torch_kit.reduction.named import Saved
from elasticdl.elastic.torch_kit.reduction.reducer import GradientReducer
from elasticdl.elastic.torch_kit.torch_job import ElasticContext, sum_of_all
from elasticdl.elastic.training import state
from elasticdl.elastic.training.copies import UNCHANGING, copied
from elasticdl.elastic.training.pieces import Array, Marks

# Settings of an optimizer that say how it computes, which workers on other devices may do otherwise; and no settings.
COPIED_WHEN_LOADED = ("model", "optimizer", "outside")  # parts of the state that need not arrive on the device
OF_EACH_WORKER = ("params", "foreach", "fused", "capturable")
MAKE_THE_MODEL = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class TorchState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`.

    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    _remedy = "call batch.backward(loss) exactly once for each micro-batch"
    _dump_to = staticmethod(torch.save)
    _load_from = staticmethod(partial(torch.load, map_location="cpu", weights_only=False))
    _leaves_absent_gradients = (
        False  # parameters that no worker has a gradient of have none after a step, instead of zeros
    )
    _makes_one_pass = False  # of a batch, while this worker is alone
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
        at each commit as well, for a loop that changes them otherwise than by ``optimizer.step()``.

        Raises:
            UserError: the optimizer is of a kind that can't be had.
        """
        for each in each_of(optimizer):
            require_summable(each, "TorchState")
        sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        super().__init__(job, sampler, values, snapshot=snapshot)
        self.model = model
        self.optimizer = optimizer
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self.attributes = Attributes(self._modules, job.warn)
        self._moved = Saved()  # buffers as of the last step
        self._share = (-1, 0.0)  # of this worker in the last batch, and in which world
        self._own_rates: list[float] = []  # of the parameter groups, to which rules apply
        self._reducer = GradientReducer(
            self._summed,
            self._modules(),
            job.collective,
            leaves_missing_grads_none=self._leaves_absent_gradients,
            may_be_summed=job.under_master,
            hooks_rest=job.under_master or not self._makes_one_pass,
        )
        self.hooks = self._reducer.hooks
        self._weighed = WeighedGradients(
            self._summed, "batch.backward(loss)", job.warn, may_be_summed=job.under_master and sampler is not None
        )
        if sampler is not None:
            sampler.attach(self._reducer, self._reduce, self._weighed, least_samples(self._modules()))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._step_made())
        self._save_moved()
        self.save(p.SaveScope.AT_COMMIT)

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def sync(self, world: World) -> None:
        # A scheduler leaves that mark.
        scheduled = [
            each for each in each_of(self.optimizer) if any("initial_lr" in group for group in each.param_groups)
        ]
        optimizers = [getattr(value, "optimizer", None) for value in self.values.values()]
        held = [
            *optimizers,
            *(getattr(each, "optimizer", None) for each in optimizers),
        ]  # which may be wrapped, as by accelerate
        all_held = all(any(each is known for known in held) for each in scheduled)
        if not all_held and self.rate is None and world.is_first and world.rank == 0:
            self._job.warn(
                "a scheduler sets the optimizer's learning rate and is not part of the state: a newcomer begins with it anew; "
                "give it along, as in TorchState(scheduler=scheduler)"
            )
        if world.is_first and world.rank == 0:
            for each in further_modules(self.model, self.optimizer.param_groups, self.values.values()):
                self._job.warn(f"a {type(each).__name__} {IS_OUTSIDE}")
        super().sync(world)

    def reduce_gradients(self) -> None:
        """Sum the gradients of all workers now, for what needs them before ``optimizer.step()``: clipping, a GradScaler.

        Nothing is left to do after `StepBatch.backward` of this worker's last micro-batch.

        Raises:
            UserError: the workers train different parameters.
            WorldBroken: the step is torn; parameters are untouched.
        """
        self._reduce(None)

    def mean(self, own: float) -> float:
        """The mean over the global batch of what is ``own`` over this worker's part of it; between two epochs, over that of the last
        step. All workers ask alike.

        Raises:
            UserError: workers ask by different numbers, as within the loop over micro-batches.
            WorldBroken: a worker is lost, and the step is torn.
        """
        if self._job.size == 1:
            return own
        batch = self.sampler.current if self.sampler is not None else None
        if batch is not None and batch.untaken > 0:
            raise UserError(
                "elastic.mean() was called before the batch's last micro-batch, of which workers have different numbers: call it after the "
                "loop over micro-batches, for what is a mean over all that this worker has"
            )
        if batch is not None:
            self._share = (self._job.world.version, batch.share)
        version, share = self._share
        weight = share if version == self._job.world.version else 1 / self._job.size
        return sum_of_all(self._job, own * weight if weight else 0.0)

    def _cast_end_vote(self, state: int) -> Vote:
        return self._reducer.end(state)

    # -- around optimizer.step() --

    def _before_step(self, *_: Any) -> None:
        self.reduce_gradients()
        self._before_update()

    def _reduce(self, backward: Callable[[], object] | None) -> None:
        """``backward`` makes the last gradients of this step; None if they are there."""
        if self._position.is_reduced:
            if backward is not None:
                raise UserError(f"the gradients of this step are reduced already: {self._remedy}")
            return
        batch = self.sampler.current if self.sampler is not None else None
        if batch and backward is None:
            self._weighed.require()
        if batch and self._measures_noise:
            self._reducer.measure_noise(self._job.policy.batch_size(self._job.world.size))
        if backward is not None:
            self._reducer.backward(backward, last=True)
        self._job.advance(Activity.WAIT)
        part = 1 / self._job.world.size
        outcome = self._reducer.close(
            leaving=self._job.leaving,
            stopping=self._wants_to_stop,
            share=None if batch else part,
            batch=self._batch_check.ballot(batch.plan if batch else None),
            state=self._check.ballot(),
            scale=1.0 if batch else part,
        )
        self._share = (self._job.world.version, batch.share) if batch else (-1, 0.0)
        self._voted(outcome.vote, outcome.seconds)
        self.hooks.call(lambda: step_seed(self._job.seed, self.progress.step, EVERYBODY))

    @property
    def _measures_noise(self) -> bool:
        """What more workers are worth depends on it only where they make the batch larger."""
        return not self._job.policy.fixed and self.progress.step % NOISE_STEPS == 0

    def _summed(self) -> Iterator[torch.nn.Parameter]:
        """Of which the gradients are summed in a step."""
        return self.parameters()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of the optimizer; each once, also where two optimizers have it."""
        every = {id(each): each for group in self.optimizer.param_groups for each in group["params"]}
        return iter(every.values())

    # -- the parts of a state --

    def sent(self) -> dict[str, Any]:
        """Beside the state what modules and others hold in attributes, and the optimizer's groups."""
        groups = dump_groups(self._modules(), self.optimizer)
        return {**super().sent(), "held": {"attributes": self.attributes.dump(), "groups": groups}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        held = state.get("held")  # a checkpoint has none
        if held is not None:
            load_groups(held["groups"], self._modules(), self.optimizer)
            self.attributes.load(held["attributes"])
        super().load_state_dict(state)

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
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        outside = dump_outside(self._modules(), self.parameters())
        return {**own, "outside": outside} if outside else own

    def _load_own(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                f"the model here can't take that of the others: {one_line(error)}; what is put into a model while it trains, as by "
                "pruning, does not reach a worker that comes later: make it with the model"
            ) from error
        load_outside(state.get("outside", {}), self._modules(), self.parameters())
        if self._job.device.type != "cpu":
            self.optimizer.state.clear()  # else the old slots and the new ones are on the device at once
        self.optimizer.load_state_dict(state["optimizer"])

    def misfit(self, saved: dict[str, Any]) -> str:
        if is_other_kind(saved["optimizer"], self.optimizer.state_dict()):
            return "its optimizer is of another kind"
        return super().misfit(saved)

    def settings(self) -> Mapping[str, Any]:
        groups = [
            {key: _as_set(value) for key, value in group.items() if key not in OF_EACH_WORKER}
            for group in self.optimizer.param_groups
        ]
        return {"optimizer.param_groups": groups}

    def model_parts(self) -> Mapping[str, Any]:
        slots = [
            {name: each for name, each in one.state_dict().items() if name != "param_groups"}
            for one in each_of(self.optimizer)
        ]
        # Buffers that are not persistent may be caches of each worker's own.
        held: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": slots if len(slots) > 1 else slots[0]}
        if outside := outside_parameters(self._modules(), self.parameters()):
            held["outside"] = outside
        kinds: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            if self._makes_the_model(value):
                kinds.setdefault(_kind(name, value), {})[name] = value.state_dict()
        for kind, each in kinds.items():
            held[kind] = each if len(each) > 1 else next(iter(each.values()))
        return held

    def _makes_the_model(self, value: Any) -> bool:
        # A scheduler that is wrapped, as by accelerate, is of another class.
        return isinstance(value, MAKE_THE_MODEL) or (hasattr(value, "optimizer") and hasattr(value, "state_dict"))

    def marks_of(self, arrays: Sequence[Any]) -> Marks:
        return marks_of(arrays)

    def host_array(self, value: Any) -> Array:
        return host_array(value)

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
        self._moved.restore()
        self._reducer.followers.restore()
        self.attributes.restore()
        if self._snapshot:
            self._load_own(copy.deepcopy(self._saved["own"]))  # an optimizer works on what it is given

    def _broadcast(self) -> dict[str, Any]:
        return broadcast_state(self.sent(), self._job.collective, on_host=COPIED_WHEN_LOADED)

    def _broadcast_model(self, values: dict[str, Any]) -> dict[str, Any]:
        own = {**self._dump_own(), "values": values}
        return broadcast_state(own, self._job.collective, on_host=COPIED_WHEN_LOADED, to_all=True)

    def save(self, part: p.SaveScope) -> None:
        super().save(part)
        if part is p.SaveScope.AT_COMMIT:
            self.attributes.commit(may_be_torn=self._job.size > 1)
        if self._snapshot and part is p.SaveScope.AT_COMMIT:
            self._saved["own"] = copied(self._dump_own(), self._saved.get("own"), self._copy_tensor)
        if self._snapshot or part is p.SaveScope.WITH_PARAMETERS:
            self._save_moved()

    def _save_moved(self) -> None:
        """What forward passes change."""
        self._moved.save(self._reducer.buffers.find(anew=False))
        self._reducer.followers.save()

    def _modules(self) -> list[torch.nn.Module]:
        """The model, and others that were given along: their buffers are summed and saved like its own."""
        others = [each for each in self.values.values() if isinstance(each, torch.nn.Module)]
        return [self.model, *others]

    def _copy_tensor(self, value: Any, before: Any) -> torch.Tensor | None:
        if not _is_whole(value):
            return None
        alike = _is_whole(before) and (before.shape, before.dtype) == (value.shape, value.dtype)
        made: torch.Tensor = before if alike and before.device == value.device else torch.empty_like(value)
        with torch.no_grad():
            return made.copy_(value)


def _kind(name: str, value: Any) -> str:
    """As people know it."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return name
    return "scaler" if isinstance(value, torch.amp.GradScaler) else "scheduler"


def _as_set(value: Any) -> Any:
    """A setting as it can be written out; of one on a GPU nobody asks at each step."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value if type(value) in UNCHANGING or type(value) is tuple else plain_text(value)


def _is_whole(value: Any) -> bool:
    """A plain tensor that shares its memory with no other."""
    return (
        type(value) is torch.Tensor
        and not value.requires_grad
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    )
