"""Which numbers of workers a job may have: `scale` refuses what submission refuses."""

import asyncio

import grpc
import pytest

from elasticdl.job.spec import JobSpec
from elasticdl.job.worker_range import WorkerRange
from elasticdl.master.shell.servicer import Servicer
from elasticdl.master.state.events import ScaleRequested
from elasticdl.proto import elasticdl_pb2 as pb

KUEUE, VOLCANO = {"queue": "kueue=train"}, {"queue": "volcano=train"}
FIXED = "the gang in --queue {} was submitted with 4 workers, which can't be changed: submit another job"
WHOLE = "--gang trains with all workers or none: give one number of workers, not 2-8"


class RefusedError(Exception):
    """What a call is answered with."""


class Context:
    async def abort(self, code, text):
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        raise RefusedError(text)


class Mailbox:
    def __init__(self):
        self.events = []

    def post(self, event):
        self.events.append(event)

    async def settled(self):
        return True


def scaled(spec, workers):
    """What a master of this job answers, and what it then does."""
    mailbox = Mailbox()
    status = pb.JobStatus(job_name="digits", phase="running", min_workers=4, max_workers=4)
    servicer = Servicer(mailbox, None, lambda: status, None, None, None, pb.Welcome, spec.why_not_scaled_to)
    low, high = workers
    request = pb.ScaleRequest(min_workers=low, max_workers=high)
    try:
        answer = asyncio.run(servicer.Scale(request, Context())).message
    except RefusedError as refusal:
        answer = str(refusal)
    return answer, mailbox.events


@pytest.mark.parametrize(
    ("options", "workers", "refusal"),
    [
        (KUEUE, (2, 8), FIXED.format("kueue=train")),
        (KUEUE, (8, 8), FIXED.format("kueue=train")),
        (KUEUE, (2, 2), FIXED.format("kueue=train")),
        (VOLCANO, (8, 8), FIXED.format("volcano=train")),
        ({}, (2, 8), WHOLE),
    ],
)
def test_a_gang_is_not_scaled_to_what_it_could_not_be_submitted_with(options, workers, refusal):
    spec = JobSpec.model_validate({"image": "i", "gang": True, "num_workers": "4", **options})
    assert scaled(spec, workers) == (refusal, [])


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"gang": True, **KUEUE}, (4, 4)),
        ({"gang": True}, (8, 8)),  # without a queue nobody holds it to a size
        (KUEUE, (2, 8)),
        ({}, (2, 8)),
    ],
)
def test_other_jobs_are_scaled(options, workers):
    spec = JobSpec.model_validate({"image": "i", "num_workers": "4", **options})
    low, high = workers
    assert scaled(spec, workers)[1] == [ScaleRequested(WorkerRange(minimum=low, maximum=high))]
