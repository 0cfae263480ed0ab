"""What one worker reports for the job's journal: its notices, its pauses and its failure."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from elasticdl.elastic.core.pause import Pause
from elasticdl.elastic.session.membership import Membership
from elasticdl.proto import elasticdl_pb2 as pb

# Characters. What the master keeps of a job has to fit into one object of a cluster, and each worker may fail.
MOST_OF_MESSAGE = 500
MOST_OF_TRACEBACK = 20_000
log = logging.getLogger(__name__)


def notify(membership: Membership, event: str, **fields: Any) -> None:
    """``event`` and its fields as in `elasticdl.common.journal.EVENTS`."""
    membership.say(pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields))))


def say_pause(membership: Membership, pause: Pause) -> None:
    log.info(
        "pause of %.0f ms (%s): notice %.0f, drain %.0f, rendezvous %.0f, init %.0f, sync %.0f, first step %.0f",
        *(1e3 * pause.total, pause.kind, 1e3 * pause.notice, 1e3 * pause.drain, 1e3 * pause.rendezvous),
        *(1e3 * pause.init, 1e3 * pause.sync, 1e3 * pause.first_step),
    )
    membership.say(pb.WorkerMessage(pause=pb.Pause(**asdict(pause), total=pause.total)))


def say_failure(membership: Membership, cause: pb.Failed.Cause, message: str, traceback: str) -> None:
    """This worker can't go on. Of the message only the first line is told."""
    line = shortened(message.strip().partition("\n")[0], MOST_OF_MESSAGE) or "no reason was given"
    failed = pb.Failed(cause=cause, message=line, traceback=shortened(traceback, MOST_OF_TRACEBACK))
    membership.say(pb.WorkerMessage(failed=failed))


def shortened(text: str, most: int) -> str:
    """Without its middle if it is longer."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
