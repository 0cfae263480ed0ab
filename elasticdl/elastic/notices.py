"""What one worker reports for the job's journal: its notices and its pauses."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from elasticdl.elastic.pause import Pause
from elasticdl.elastic.session import Membership
from elasticdl.proto import elasticdl_pb2 as pb

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
