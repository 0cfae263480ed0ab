"""``transformers.Trainer``, whose training goes on while workers come and go.

And what is refused of its arguments, which checkpoint it resumes from, and what the job is told of evaluations and checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from elasticdl.common.errors import UserError
from elasticdl.common.reason import tell_uncaught_in_one_line
from elasticdl.elastic.torch_kit.refusals import TRAINS_ONCE, of_data, of_group, of_modules, refuse
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.tensors import own as runtime
from elasticdl.elastic.transformers.trainer_host import TrainerHost, is_whole

# What can't be had of a trainer of Hugging Face with workers that come and go, found before training begins.

WHO = "elastic.transformers"
SEARCH = f"hyperparameter_search {TRAINS_ONCE}"
STAYS = "divides the model among workers that must stay"


def require_elastic(trainer: Any) -> None:
    """Raises:
    UserError: this trainer can't train elastically.
    """
    refuse(WHO, _reasons(trainer))


def _reasons(trainer: Any) -> Iterator[str]:
    if not hasattr(trainer, "_run_epoch"):
        yield f"transformers {transformers.__version__} is too old: install 5.3 or a later version"
        return
    args = trainer.args
    if trainer.model is None:  # it is made anew for each of several trainings
        yield SEARCH
    yield from of_group()
    if args.world_size > 1:
        yield "it is one of several processes, as by torchrun: start the script by `python` or by `elasticdl run`"
    if args.n_gpu > 1:
        yield f"it sees {args.n_gpu} GPUs, and a worker trains on one: set CUDA_VISIBLE_DEVICES to one of them"
    if trainer.is_deepspeed_enabled:
        yield f"DeepSpeed {STAYS}: leave `deepspeed` out"
    if trainer.is_fsdp_enabled or args.fsdp:
        yield f"FSDP {STAYS}: leave `fsdp` out"
    if args.parallelism_config is not None:
        yield f"parallelism_config {STAYS}: leave it out"
    is_divided = trainer.is_model_parallel or getattr(trainer, "is_distributed_loading_by_transformers", False)
    if is_divided or (getattr(trainer.model, "tp_size", None) or 1) > 1:
        yield "the model is divided over several devices: leave device_map and tp_plan out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the batch size: give per_device_train_batch_size"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint stops all workers when one is told to leave: leave it out, as the others go on"
    yield from of_data(trainer.train_dataset)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or optimizer.endswith("_layerwise"):
        yield f"optim='{optimizer}' steps during the backward pass, before other workers' gradients are there: take another"
    yield from of_modules(trainer.model)


# What a worker resumes from that has come later: not a checkpoint.
FROM_THE_JOB = ""


class Elastic:
    """Before the class of a trainer, whatever that is: what of it is different among other workers."""

    _elastic: TrainerHost

    # -- the beginning --

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(_to_resume_from(self, resume_from_checkpoint), *args, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._elastic.has_begun:
            raise UserError("trainer.train() was called before: a script trains once")
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def _init_training_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        self._elastic.begin_at(*place)
        return place

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, *args: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, *args)  # type: ignore[misc]
        self._elastic.begin(train_dataloader)
        return prepared

    # -- an epoch --

    def _run_epoch(self: Any, **given: Any) -> None:
        resumes = given["resume_from_checkpoint"] is not None and given["epoch"] == given["epochs_trained"]
        at = given["steps_trained_in_current_epoch"] if resumes and not self.args.ignore_data_skip else 0
        has_come_later = self._elastic.is_catching_up
        first = self._elastic.go_to(given["epoch"], at)
        if first is None:
            return
        if has_come_later:
            given.update(resume_from_checkpoint=FROM_THE_JOB, epochs_trained=given["epoch"])
            given["steps_trained_in_current_epoch"] = first
        # Batches come from the training's own iterator; this only counts.
        given["train_dataloader"] = DataLoader(range(given["steps_in_epoch"]), generator=torch.Generator())  # type: ignore[arg-type]
        super()._run_epoch(**given)  # type: ignore[misc]

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint != FROM_THE_JOB:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            self._elastic.note_resumed()

    # -- a step --

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples(self._elastic.present(), num_batches, device)  # type: ignore[misc]

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: torch.device) -> Any:
        count = super()._get_num_items_in_batch  # type: ignore[misc]
        return self._elastic.count(batch_samples, lambda samples: count(samples, device))

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        run = partial(super().training_step, model)  # type: ignore[misc]
        loss: torch.Tensor = self._elastic.make_pass(inputs, num_items_in_batch, run)
        return loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        self._elastic.look(result[0] if isinstance(result, tuple) else result)
        return result

    # -- between steps --

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        self._elastic.leave_step()
        evaluates = self.control.should_evaluate
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if evaluates:
            self._elastic.decide_alike()

    def _evaluate(self: Any, *args: Any, skip_scheduler: bool = False) -> Any:
        began = time.monotonic()
        if skip_scheduler and self._elastic.is_catching_up:  # before the first step, which the others have made
            return {}
        found = super()._evaluate(*args, skip_scheduler=skip_scheduler)  # type: ignore[misc]
        if self._elastic.is_first:
            tell_evaluation(self._elastic.job, self, found, time.monotonic() - began)
        return found

    def prediction_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._elastic.advance()
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    # -- files --

    def is_local_process_zero(self) -> bool:
        return self._elastic.is_first

    def is_world_process_zero(self) -> bool:
        return self._elastic.is_first

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        state = self.state
        prefix = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-")
        if self._elastic.is_first:
            began = time.monotonic()
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            tell_checkpoint(self._elastic.job, self, f"{prefix}{state.global_step}", time.monotonic() - began)
            return
        self.store_flos()
        best = f"{prefix}{state.best_global_step}"
        if state.best_global_step and (state.best_global_step == state.global_step or os.path.exists(best)):
            state.best_model_checkpoint = best
        write = partial(super()._save_checkpoint, model, trial)  # type: ignore[misc]
        self._elastic.unwritten = f"{prefix}{state.global_step}", write

    def _load_best_model(self: Any) -> None:
        self._elastic.wait_for(self.state.best_model_checkpoint)
        super()._load_best_model()  # type: ignore[misc]

    # -- the end --

    def _finalize_training(self: Any, *args: Any) -> Any:
        self._elastic.end_of_training()
        return super()._finalize_training(*args)  # type: ignore[misc]


def _to_resume_from(trainer: Any, given: str | bool | None) -> str | bool | None:
    """What a trainer resumes from that was told to resume from ``given``. True is the latest checkpoint that is whole."""
    if trainer._elastic.job.comes_later:  # it is sent the job's state, and what it finds may be half written
        return None
    return whole_checkpoint(trainer._get_output_dir(None)) or given if given is True else given


def whole_checkpoint(folder: str) -> str | None:
    """The latest one in this folder that was written to its end."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        prefix, _, step = name.rpartition("-")
        if prefix == PREFIX_CHECKPOINT_DIR and step.isdecimal() and is_whole(os.path.join(folder, name)):
            found.append((int(step), name))
    return os.path.join(folder, max(found)[1]) if found else None


# What the job is told of evaluations and checkpoints, so that their time does not count as training.

# How names of a trainer's metrics end that say how fast it evaluates, and when.
OF_SPEED = ("_runtime", "_per_second", "epoch")


def tell_evaluation(job: ElasticContext, trainer: Any, metrics: Any, seconds: float) -> None:
    numbers = {name: each for name, each in dict(metrics or {}).items() if type(each) in (int, float)}
    quality = {name: each for name, each in numbers.items() if not name.endswith(OF_SPEED)}
    about = {"step": trainer.state.global_step, "epoch": int(trainer.state.epoch or 0)}
    job.tell_work("evaluation", **about, metrics=quality, seconds=seconds)


def tell_checkpoint(job: ElasticContext, trainer: Any, folder: str, seconds: float) -> None:
    job.tell_work("checkpoint", step=trainer.state.global_step, path=folder, seconds=seconds, held=seconds)


def follow_rank(args: Any, is_first: Callable[[], bool]) -> None:
    """Have these ``TrainingArguments`` say that files are written where ``is_first`` holds at that time."""
    plain = type(args)

    class ElasticArguments(plain):  # type: ignore[misc, valid-type]
        @property
        def should_save(self) -> bool:
            return is_first()

        @property
        def should_log(self) -> bool:
            return is_first()

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Saved with a model, they are what the script has made."""
            return object.__new__, (plain,), dict(vars(self))

    ElasticArguments.__name__, ElasticArguments.__qualname__ = plain.__name__, plain.__qualname__
    args.__class__ = ElasticArguments


def patch(trainer: Any) -> Any:
    """Have this ``transformers.Trainer``, or one of a class derived from it, train elastically, as ``patch(trainer).train()`` (docs/transformers.md).

    Returns:
        The trainer itself.

    Raises:
        UserError: it can't; one line says why.
    """
    if isinstance(trainer, Elastic):
        return trainer
    if not isinstance(trainer, transformers.Trainer):
        raise UserError(
            f"elastic.transformers.patch: this is a {type(trainer).__name__}; expected a transformers.Trainer"
        )
    tell_uncaught_in_one_line()
    require_elastic(trainer)
    job = runtime.init_in_place(trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps)
    host = TrainerHost(trainer, job, runtime.leave)
    runtime.train_in_place(host.finish)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (Elastic, kind), {"__module__": kind.__module__, "_elastic": host})
    follow_rank(trainer.args, lambda: host.is_first)
    return trainer


class BeforeTraining:
    """A trainer that is patched when it begins to train. Where nothing is known of other workers yet, one of them writes already."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = _to_resume_from(patch(self), resume_from_checkpoint)
        return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def is_local_process_zero(self) -> bool:
        return runtime.rank() == 0

    def is_world_process_zero(self) -> bool:
        return runtime.rank() == 0


class Trainer(BeforeTraining, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, elastically; its arguments are unchanged.

    ``train()`` raises a `UserError` of one line where something of the trainer can't be had; docs/transformers.md lists that.
    """


class Seq2SeqTrainer(BeforeTraining, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer``, elastically; its arguments are unchanged (docs/transformers.md)."""
