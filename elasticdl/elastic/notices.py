"""Entries for the job's journal, sent by the worker that did the thing."""

from __future__ import annotations

import json
from typing import Any

from elasticdl.elastic.session import Membership
from elasticdl.proto import elasticdl_pb2 as pb


def notify(membership: Membership, event: str, **fields: Any) -> None:
    """``event`` and its fields as in `elasticdl.common.journal.EVENTS`."""
    membership.say(pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields))))
