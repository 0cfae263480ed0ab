"""Batches of which one device makes no gradients, as the training step returns None for them: nor does any worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elasticdl.elastic.lightning.logged import GivenBatch, Logged
from elasticdl.elastic.torch_kit.participant.participant import Participant


def gathered(
    participant: Participant,
    open_batches: Sequence[GivenBatch],
    logged: Logged,
    objective: torch.Tensor,
    restore_streams: Callable[[], None],
) -> torch.Tensor:
    """What the workers say before they sum gradients. Returns this worker's part of the loss, as it is then.

    Raises:
        WorldBroken: nothing is summed.
    """
    alone = participant.job.size == 1
    if alone and not any(each.logged for each in open_batches):
        return objective
    own = sum({_bit(number) for number, given in enumerate(open_batches) if given.has_no_loss or given.is_left_out})
    marks = logged.gather([each.logged for each in open_batches], own)
    left_out = [given for number, given in enumerate(open_batches) if marks & _bit(number)]
    if not left_out or alone:
        return objective
    for given in left_out:
        given.is_left_out = True
    participant.state.drop_gradients()
    if len(left_out) < len(open_batches):  # which have been added to those of the others
        participant.state.reset_buffers()
        participant.state.begin_step()
        participant.remake()
        restore_streams()
    kept = [each.objective for each in open_batches if not each.is_left_out]
    return sum(kept, torch.zeros(()))


def _bit(number: int) -> int:
    """Of the marks of a step's batches, which travel as one number. The last one stands for all that follow, too."""
    return 1 << min(number, 50)
