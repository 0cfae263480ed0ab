"""Messages of protobuf from and to the core's dataclasses, whose fields have the same names. The core sees no message."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.shared_values import standing
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.values import World
from elasticdl.proto import elasticdl_pb2 as pb

_MOST_LINES, _MOST_OF_LINE = 100, 1000  # of a list in a notice
_LARGEST = {"epoch": 2**31 - 1}  # integers that the status takes; others have 64 bits
_LAST_WORLD = 2**62
_PAUSES = ("grow", "shrink", "failure")
T = TypeVar("T")
_TOLD: Mapping[type[i.Instruction], str] = {
    i.AnnounceChange: "change",
    i.BreakWorld: "broken",
    i.DrainWorker: "drain",
    i.StopWorkers: "stop_work",
    i.DumpStacks: "dump_stacks",
    i.TellLearnt: "learnt",
}


def connected(hello: pb.Hello) -> e.WorkerConnected:
    return _copied(e.WorkerConnected, hello, world_version=_version(hello.world_version))


def to_event(worker_id: int, message: pb.WorkerMessage) -> e.Event:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    body = message.WhichOneof("body")
    match body:
        case "heartbeat":
            beat = message.heartbeat
            times = _copied(e.StepTimes, beat.times) if beat.HasField("times") else None
            return _copied(e.HeartbeatReceived, beat, worker_id=worker_id, times=times)
        case "ask":
            left_world = _version(message.ask.left_world)
            return _copied(e.JoinRequested, message.ask, worker_id=worker_id, left_world=left_world)
        case "draining":
            return _copied(e.WorkerDraining, message.draining, worker_id=worker_id)
        case "progress":
            steps = _each_copied(e.StepReport, message.progress.steps)
            return _copied(e.ProgressReported, message.progress, worker_id=worker_id, steps=steps)
        case "finished":
            metrics = dict(message.finished.metrics)
            return _copied(e.WorkerFinished, message.finished, worker_id=worker_id, metrics=metrics)
        case "failed":
            users = message.failed.cause == pb.Failed.USER
            return _copied(e.WorkerFailed, message.failed, worker_id=worker_id, users=users)
        case "pause":
            return e.NoticeReported(worker_id, "pause", _pause(message.pause), message.number)
        case "notice":
            return e.NoticeReported(worker_id, message.notice.event, _notice(message.notice), message.number)
    raise ValueError(f"a session does not take {body or 'an empty message'} here")


def to_message(instruction: i.Instruction) -> pb.MasterMessage:
    """The message of an instruction that workers carry out; it is the same for all of them."""
    name = _TOLD[type(instruction)]
    fields = getattr(pb.MasterMessage(), name).DESCRIPTOR.fields
    return pb.MasterMessage(**{name: {field.name: getattr(instruction, field.name) for field in fields}})


class WorldMessages:
    """A world as each of its members sees it. What all are told alike is made once, as it takes long with many members."""

    def __init__(self, world: World) -> None:
        self.version = world.version
        self._members = {member.worker_id: (rank, member) for rank, member in enumerate(world.members)}
        self._alike = pb.World(
            version=world.version,
            reason=world.reason,
            size=len(world.members),
            standing=standing(world.members),
            root=pb.Member(**_values(world.members[0])),
        )

    @property
    def worker_ids(self) -> Collection[int]:
        """Of the members."""
        return self._members.keys()

    def told(self, worker_id: int) -> pb.MasterMessage:
        """What this member is told."""
        rank, member = self._members[worker_id]
        message = pb.MasterMessage(world=self._alike)
        message.world.MergeFrom(pb.World(rank=rank, own=pb.Member(**_values(member))))
        return message


def to_status(job_name: str, job: Job, now: float, elapsed: float) -> pb.JobStatus:
    view, training = job.view(), job.training
    shown = ("phase", "reason", "traceback", "world_version", "last_change", "advice", "decision")
    achieved = ("epoch", "total_epochs", "step", "total_steps", "loss", "samples", "metrics", "collective",
                "compared_step", "compared_workers")  # fmt: skip
    return pb.JobStatus(
        job_name=job_name,
        **{name: getattr(view, name) for name in shown},
        **{name: getattr(training, name) for name in achieved},
        workers=[_values(worker) for worker in view.workers],
        samples_per_second=training.samples_per_second(now),
        time_left=training.time_left(now),
        elapsed=elapsed,
        min_workers=view.limits.minimum,
        max_workers=view.limits.maximum,
    )


def _copied(kind: type[T], message: object, **given: object) -> T:
    """One of the core's values, with the fields of a message; ``given``: those that the message does not have so."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return kind(*[given[name] if name in given else getattr(message, name) for name in names])


def _each_copied(kind: type[T], messages: Iterable[object]) -> tuple[T, ...]:
    """Quicker than `_copied` for each."""
    values = attrgetter(*kind.__match_args__)  # type: ignore[attr-defined]
    return tuple(kind(*values(message)) for message in messages)


def _values(said: object) -> dict[str, Any]:
    """The fields of one of the core's values."""
    return {name: getattr(said, name) for name in said.__match_args__}  # type: ignore[attr-defined]


def _version(told: int) -> int:
    """Of a world that a worker knows: the next worlds are counted on from it."""
    return max(0, min(told, _LAST_WORLD))


def _pause(pause: pb.Pause) -> dict[str, object]:
    """The journal's fields of a pause, without the worker: time that a survivor did not train."""
    if pause.kind not in _PAUSES:
        raise ValueError(f"a pause is of the kind {', '.join(_PAUSES)}, not {pause.kind!r}")
    fields = (field.name for field in pause.DESCRIPTOR.fields)
    return {"world" if name == "world_version" else name: getattr(pause, name) for name in fields}


def _notice(notice: pb.Notice) -> dict[str, Any]:
    kinds = KINDS[notice.event].of_worker if notice.event in KINDS else {}
    if not kinds:
        raise ValueError(f"a worker has no notice {notice.event!r} to give")
    fields = json.loads(notice.fields_json or "{}")
    if not isinstance(fields, dict):
        raise ValueError(f"the fields of a notice must be a JSON object, not {notice.fields_json!r}")
    if missing := KINDS[notice.event].missing(fields):
        raise ValueError(f"a notice {notice.event} must say {', '.join(missing)}")
    fields = {name: _encodable(value) for name, value in fields.items()}
    for name, value in fields.items():
        if name not in kinds or not isinstance(value, kinds[name]):
            raise ValueError(f"a notice {notice.event} does not have {name}={value!r}")
        if isinstance(value, list):
            _require_lines(notice.event, name, value)
        if isinstance(value, dict) and not all(isinstance(each, int | float) for each in value.values()):
            raise ValueError(f"{name} must be numbers, not {value!r}")
    if not all(epoch.isdecimal() and int(epoch) <= _LARGEST["epoch"] for epoch in fields.get("marks", {})):
        raise ValueError(f"marks must be by epoch, not {fields['marks']!r}")
    numbers = {name: each for value in fields.values() if isinstance(value, dict) for name, each in value.items()}
    for name, value in {**numbers, **fields}.items():
        most = _LARGEST.get(name, 2**63 - 1)
        least = 0 if name in fields else -most
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"{name} of a notice must be {least} to {most}, not {value}")
    return fields


def _encodable(value: Any) -> Any:
    """A file's name may have bytes that are no UTF-8. Python keeps such a byte as a lone surrogate, which can't be sent on."""
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _require_lines(event: str, name: str, lines: list[object]) -> None:
    if len(lines) > _MOST_LINES or not all(isinstance(line, str) and len(line) <= _MOST_OF_LINE for line in lines):
        raise ValueError(
            f"{name} of a notice {event} must be at most {_MOST_LINES} lines of {_MOST_OF_LINE} characters"
        )
