"""When training stops: ``trainer.should_stop`` of any worker is that of all, at once. So is an epoch's end by the module's hook.

A callback sets it by what it has seen, which is this worker's part of a batch, or its own clock. On one device it takes effect
before the next batch, and here too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from elasticdl.elastic.lightning.decisions import Decisions
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

LIGHTNINGS = ("lightning", "pytorch_lightning")
STARTS, LEAVES_REST = "on_train_batch_start", -1
BY_THE_CLOCK = ("Timer",)
# Hooks of a module that are called once the gradients are summed.
AFTER_THE_SUM = re.compile(
    "on_after_backward|configure_gradient_clipping|(on_before_)?optimizer_step|(optimizer|on_before)_zero_grad|lr_scheduler_step|on_train_batch_end"
)


def may_wish_late(trainer: Any) -> bool:
    """Whether the script may stop training when the gradients of a step are summed."""
    module = trainer.lightning_module
    hooks: list[Any] = [getattr(module, name) for name in dir(type(module)) if AFTER_THE_SUM.fullmatch(name)]
    kinds: list[Any] = [*hooks, *map(type, trainer.callbacks)]
    is_own = any(each.__module__.partition(".")[0] not in LIGHTNINGS or each.__name__ in BY_THE_CLOCK for each in kinds)
    return is_own or not module.automatic_optimization


class Stopping:
    """Asks where Lightning looks next: after a validation, after an epoch, and after a batch. There a wish has come with the gradients, unless the script
    `may_wish_late`, or the batch is not the step's last."""

    def __init__(self, trainer: Any, decisions: Decisions) -> None:
        self._trainer = trainer
        self._decisions = decisions
        self._wish = False  # of this worker, which the others have not heard
        self._may_wish_late = may_wish_late(trainer)
        self.heard: bool | None = None  # whether anybody wishes it, if nobody may wish it later in the step
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._places = ((epoch_loop, "on_advance_end"), (epoch_loop.val_loop, "run"), (fit_loop, "on_advance_end"))
        self._put_skips()
        self._put(epoch_loop, "on_advance_end", self._ask_after_batch, lambda: None)
        self._put(epoch_loop.val_loop, "run", lambda: None, self._ask_after_validation)
        self._put(fit_loop, "on_advance_end", lambda: None, self._ask)

    def end(self) -> None:
        """The loops are Lightning's again."""
        for loop, name in (*self._places, (self._trainer.lightning_module, STARTS)):
            vars(loop).pop(name, None)

    def _put(self, loop: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        own = getattr(loop, name)

        @functools.wraps(own)
        def asking(*args: Any, **kwargs: Any) -> Any:
            before()
            result = own(*args, **kwargs)
            after()
            return result

        setattr(loop, name, asking)

    def _put_skips(self) -> None:
        """The module's hook of a batch may leave out the rest of the epoch, which it says by -1."""
        module = self._trainer.lightning_module
        own = getattr(module, STARTS)
        if own.__module__.partition(".")[0] in LIGHTNINGS:  # which never does
            return

        @functools.wraps(own)
        def asking(*args: Any, **kwargs: Any) -> Any:
            response = own(*args, **kwargs)
            leaves = self._decisions.anybody(response == LEAVES_REST)
            if leaves is None:
                return response
            return LEAVES_REST if leaves else None

        setattr(module, STARTS, asking)

    def ride(self, job: ElasticContext) -> list[float]:
        wish = (self._wish or self._trainer.should_stop) and not job.is_told_to_leave
        return [float(wish), float(self._may_wish_late)]

    def _ask_after_batch(self) -> None:
        heard, self.heard = self.heard, None
        participant, trainer = self._decisions.participant, self._trainer
        if heard is None or participant is None or participant.is_catching_up:
            self._ask()
        else:
            self._wish = not heard and (self._wish or trainer.should_stop)
            trainer.should_stop = heard

    def _ask_after_validation(self) -> None:
        if not self._trainer.sanity_checking:
            self._ask()

    def _ask(self) -> None:
        trainer = self._trainer
        self._wish = self._wish or trainer.should_stop
        answer = self._decisions.anybody(self._wish)
        trainer.should_stop = bool(answer)
        if answer is not None:
            self._wish = False
