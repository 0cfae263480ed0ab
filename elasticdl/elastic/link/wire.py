"""Between protobuf and the words of the worker's core: protobuf messages go no further inward than this."""

from __future__ import annotations

import json
import os
from operator import attrgetter
from typing import Any

from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.job import messages as m
from elasticdl.proto import elasticdl_pb2 as pb

_MEMBER = attrgetter(*Member.__match_args__)
# Of each kind of message: the name of its field in `WorkerMessage`.
_BODIES = {
    type(getattr(pb.WorkerMessage(), name)).__name__: name
    for name in pb.WorkerMessage.DESCRIPTOR.fields_by_name
    if name != "number"
}


def to_proto(message: m.Message, environment: WorkerEnvironment) -> pb.WorkerMessage:
    """Fields have the same names there, but for these."""
    fields = _fields(message)
    number = fields.pop("number", 0)
    match message:
        case m.Hello():
            fields.update(worker_id=environment.worker_id, host=environment.host, pid=os.getpid())
        case m.Heartbeat(times=times):
            fields.update(times=_fields(times) if times else None)
        case m.Progress(steps):
            fields.update(steps=[_fields(step) for step in steps])
        case m.Notice(event, told):
            fields = {"event": event, "fields_json": json.dumps(told)}
    return pb.WorkerMessage(number=number, **{_BODIES[type(message).__name__]: fields})


def to_event(message: pb.MasterMessage) -> p.Event | None:
    """None for what the core does not know of: an entry of the store, or that a last word was taken."""
    body = message.WhichOneof("body")
    match body:
        case "welcome":
            return p.Welcomed(message.welcome.heartbeat_interval, message.welcome.generation)
        case "world":
            return p.WorldPublished(_world(message.world))
        case "change" | "broken" | "drain" | "stop_work" | "dump_stacks":
            told = getattr(message, body)
            kind = getattr(m, type(told).__name__)
            return p.Ordered(kind(*(getattr(told, name) for name in kind.__match_args__)))
    return None


def _world(world: pb.World) -> World:
    root, own = Member(*_MEMBER(world.root)), Member(*_MEMBER(world.own))
    return World(world.version, world.size, world.rank, world.standing, root, own, world.reason)


def _fields(message: object) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}  # type: ignore[attr-defined]
