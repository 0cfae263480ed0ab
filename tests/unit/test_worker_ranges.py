"""Which numbers of workers a job may have, and by which rules its rate follows them."""

import asyncio

import grpc
import pytest

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.core.events import ScaleRequested
from elasticdl.master.shell.calls import Servicer
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.worker.learner import rate_rules

KUEUE, VOLCANO = {"queue": "kueue=train"}, {"queue": "volcano=train"}
FIXED = "the gang in --queue {} was submitted with 4 workers, which can't be changed: submit another job"
WHOLE = "--gang trains with all workers or none: give one number of workers, not 2-8"


class Context:
    async def abort(self, code, text):
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        raise grpc.aio.AbortError(text)


class Mailbox(list):
    post = list.append

    async def settled(self):
        return True


@pytest.mark.parametrize(
    ("options", "workers", "refusal"),
    [
        ({"gang": True, **KUEUE}, (2, 8), FIXED.format("kueue=train")),
        ({"gang": True, **KUEUE}, (2, 2), FIXED.format("kueue=train")),
        ({"gang": True, **VOLCANO}, (8, 8), FIXED.format("volcano=train")),
        ({"gang": True}, (2, 8), WHOLE),
        ({"gang": True, **KUEUE}, (4, 4), None),
        ({"gang": True}, (8, 8), None),  # without a queue nobody holds it to a size
        (KUEUE, (2, 8), None),
    ],
)
def test_a_job_is_scaled_to_what_it_could_be_submitted_with(options, workers, refusal):
    spec = JobSpec.model_validate({"image": "i", "num_workers": "4", **options})
    mailbox, (low, high) = Mailbox(), workers
    status = pb.JobStatus(job_name="digits", phase="running", min_workers=4, max_workers=4)
    servicer = Servicer(mailbox, None, lambda: status, None, None, pb.Welcome, spec.why_not_scaled_to)
    asked = servicer.Scale(pb.ScaleRequest(min_workers=low, max_workers=high), Context())
    if refusal is None:
        asyncio.run(asked)
        assert mailbox == [ScaleRequested(WorkerRange(minimum=low, maximum=high))]
        return
    with pytest.raises(grpc.aio.AbortError) as refused:
        asyncio.run(asked)
    assert (str(refused.value), mailbox) == (refusal, [])


def half(epoch):
    return 0.5


@pytest.mark.parametrize(
    ("options", "callbacks", "rules"),
    [
        ({}, [Callback()], LearningRate()),
        ({"learning_rate_scaling": "none"}, [], LearningRate()),
        ({"learning_rate_scaling": "sqrt"}, [], LearningRate(scaling="sqrt")),
        ({"learning_rate_ramp_steps": 5}, [], LearningRate(ramp_steps=5)),
        ({}, [LearningRateScheduler(print), Callback(), LearningRateScheduler(half)], LearningRate(half)),
    ],
)
def test_the_rate_follows_options_and_the_last_scheduler(options, callbacks, rules):
    assert rate_rules(JobSpec(minibatch_size=8, **options), callbacks) == rules
