"""Between protobuf and the words of the worker's core: protobuf messages go no further inward than this."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.pause import Pause
from elasticdl.elastic.core.world import Member, World
from elasticdl.proto import elasticdl_pb2 as pb


def to_proto(message: m.Message, environment: WorkerEnvironment) -> pb.WorkerMessage:
    match message:
        case m.Hello(version, step, members):
            hello = pb.Hello(
                worker_id=environment.worker_id,
                host=environment.host,
                pid=os.getpid(),
                world_version=version,
                step=step,
                members=[_member_to_proto(member) for member in members],
            )
            return pb.WorkerMessage(hello=hello)
        case m.Heartbeat():
            return pb.WorkerMessage(heartbeat=pb.Heartbeat(**_fields(message)))
        case m.JoinRequest():
            return pb.WorkerMessage(ask=pb.Ask(**_fields(message)))
        case m.Draining():
            return pb.WorkerMessage(draining=pb.Draining(**_fields(message)))
        case m.StoreEntry():
            return pb.WorkerMessage(kv_put=pb.KvPut(**_fields(message)))
        case m.StepReports(steps, total_steps, total_epochs):
            reports = [pb.StepReport(**_fields(step)) for step in steps]
            progress = pb.Progress(steps=reports, total_steps=total_steps, total_epochs=total_epochs)
            return pb.WorkerMessage(progress=progress)
        case Pause():
            return pb.WorkerMessage(pause=pb.Pause(**asdict(message), total=message.total))
        case m.Notice(event, fields):
            return pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields)))
        case m.Finished():
            return pb.WorkerMessage(finished=pb.Finished(**_fields(message)))
        case m.Failed(users, text, traceback):
            cause = pb.Failed.USER if users else pb.Failed.WORKER
            return pb.WorkerMessage(failed=pb.Failed(cause=cause, message=text, traceback=traceback))


def to_event(message: pb.MasterMessage, worker_id: int) -> p.Event | None:
    """None for what the core does not know of: an entry of the store."""
    match message.WhichOneof("body"):
        case "welcome":
            return p.Welcomed(message.welcome.heartbeat_interval, message.welcome.generation)
        case "change":
            return p.ChangeAnnounced(message.change.world_version)
        case "broken":
            return p.BreakAnnounced(message.broken.world_version, message.broken.reason)
        case "world":
            return p.WorldPublished(_world(message.world, worker_id))
        case "drain":
            return p.DrainOrdered(message.drain.reason)
        case "stop_work":
            return p.StopOrdered(message.stop_work.reason, message.stop_work.checkpoint)
        case "dump_stacks":
            return p.On.STACKS_ASKED
    return None


def _world(world: pb.World, worker_id: int) -> World:
    members = tuple(Member(each.worker_id, each.host, each.step, each.has_state, each.epoch) for each in world.members)
    rank = [member.worker_id for member in members].index(worker_id)
    return World(version=world.version, members=members, rank=rank, reason=world.reason)


def _member_to_proto(member: Member) -> pb.Member:
    return pb.Member(**_fields(member))


def _fields(message: object) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}  # type: ignore[attr-defined]
