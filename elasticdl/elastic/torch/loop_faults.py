"""What a plain loop does that can't be right, each in one line."""

from __future__ import annotations

from elasticdl.common.errors import UserError


def require_backward(*, has_batch: bool, has_stepped: bool, is_reduced: bool) -> None:
    """The script calls ``loss.backward()``. ``has_stepped``: an optimizer, on the batches in hand. ``is_reduced``: their gradients are
    summed.

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
            "gradients were looked at between two backward passes of one step, where they are not complete: look at them "
            "after the last"
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
