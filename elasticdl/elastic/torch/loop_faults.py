"""What a plain loop does that can't be right, each in one line."""

from __future__ import annotations

import sys
from types import FrameType

from elasticdl.common.errors import ElasticDLError
from elasticdl.common.reason import one_line

HINT = "and begin that loop with gradients on (with torch.no_grad() around it, it is given whole batches, for an evaluation)"
NO_BATCH = (
    "optimizer.step() was called without a batch from the loader that was prepared: train on each batch before you ask for the next, "
    f"{HINT}"
)
OUTSIDE = (
    "a step was made outside of the loop over the prepared loader, as on next(iter(loader)), on what itertools.cycle or a list has kept, or on a "
    "DataLoader made anew: loop over the loader that elastic.prepare() has returned in each epoch, train on each batch within that loop, "
    f"{HINT}"
)
GRADIENT_OF_PART = (
    "torch.autograd.grad() by a parameter that is trained, as for GradNorm or MAML, gives the gradient of this worker's part of a batch, and the workers "
    "do not sum it: call loss.backward(), and look at parameter.grad after it"
)
# Who stood where a worker was told that the job stands.
NOBODY_IS_LEFT = "this worker has passed by batches that nobody who is left has trained on: it is started again"
# Of one that steps more rarely than others, too: what it has accumulated is everybody's already, and would be summed once more.
NOT_CLEARED = (
    "the gradients of an earlier batch are still there: call zero_grad() of every optimizer between a step and the next backward(), also of one that does "
    "not step on each batch"
)
OTHERS_REPEAT = "a worker can't make the step again, or has made another pass before"
# Backward passes for which there is no sum to which their gradients could be added.
STEPPED_ALREADY = "loss.backward() was called again after optimizer.step() on the same batch: expected one step for each batch, or for several"
STEPPED_BY_ANOTHER = (
    "loss.backward() was called after an optimizer's step() on the same batch, and before another's, as for a GAN: a plain loop has one sum of "
    "gradients for each batch. Make all backward passes before the first step, or take Lightning's manual optimization"
)


def looked_between(place: str) -> str:
    return (
        f"gradients were looked at ({place}, perhaps by the step of an optimizer that elastic.prepare() was not given) between two "
        "backward passes of one step, where they are not complete: look at them after the last"
    )


# What is behind an exception of the script's on a worker that has come later.
ON_ITS_WAY = (
    "raised on a worker that was catching up, on a stand-in for a batch (elastic.catching_up() is True; it has samples of the first batch of "
    "the epoch, and the model's answer from memory): leave out there what needs real ones (docs/plain_loop.md, When a worker joins)"
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


OTHER_THREAD = (
    "the prepared loader is looped over in another thread than the one that trains, as by a background generator: workers come and go "
    "between two batches, so loop over it where optimizer.step() is called. The loader's own processes load ahead (num_workers)"
)


COPIED_ON_ITS_WAY = (
    "the loop calls a copy of the model that this worker has made while it was catching up, when the model had not got the job's "
    "parameters: make the copy before elastic.prepare(), give it along, and set it by load_state_dict()"
)


def place_in_script(what: str) -> str:
    """``FILE:LINE: WHAT``, of the nearest frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_foreign(frame):
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{place}: {what}" if what else place


def _is_foreign(frame: FrameType) -> bool:
    """No code of the script's."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "elasticdl")


def given_again(step: int, why: Exception) -> str:
    """``step``: that the loop makes by another pass, for the journal."""
    cause = str(why) if isinstance(why, ElasticDLError) else one_line(why)
    return (
        f"step {step} was torn, and was made by another pass through the script's loop ({cause}): what the loop counts or draws for a batch, it "
        "has counted or drawn twice, on all workers alike"
    )


def changes_a_parameter(place: str) -> str:
    return (
        f"{place} changes a parameter that is trained, with a batch in hand: a step that has to be made again would change it twice; change it "
        "after optimizer.step()"
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
