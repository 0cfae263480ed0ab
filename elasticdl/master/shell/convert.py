"""Messages of protobuf from and to the core's dataclasses, whose fields have the same names. The core sees no message."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import ValidationError

from elasticdl.common.errors import first_finding
from elasticdl.job import messages
from elasticdl.job.event_catalogue import KINDS
from elasticdl.job.shared_values import standing
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events
from elasticdl.master.state.values import World
from elasticdl.proto import elasticdl_pb2 as pb

_LAST_WORLD = 2**62
_PAUSES = ("grow", "shrink", "failure")
_FORMS = {kind.name: kind.form for kind in KINDS.values() if kind.of_worker}
T = TypeVar("T")
# Of each kind of message to a worker: the name of its field in `MasterMessage`.
_BODIES = {
    type(getattr(pb.MasterMessage(), name)).__name__: name for name in pb.MasterMessage.DESCRIPTOR.fields_by_name
}


def to_event(worker_id: int, message: pb.WorkerMessage) -> events.FromWorker:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    body = message.WhichOneof("body")
    if body is None or body == "kv_put":
        raise ValueError(f"a session does not take {body or 'an empty message'} here")
    told = getattr(message, body)
    match told:
        case pb.Pause():
            return events.FromWorker(worker_id, messages.Notice("pause", _pause(told), message.number))
        case pb.Notice():
            return events.FromWorker(worker_id, messages.Notice(told.event, _notice(told), message.number))
        case pb.Hello():
            given: dict[str, Any] = {"world_version": _version(told.world_version)}
        case pb.Ask():
            given = {"left_world": _version(told.left_world)}
        case pb.Heartbeat():
            given = {"times": _copied(messages.StepTimes, told.times) if told.HasField("times") else None}
        case pb.Progress():
            given = {"steps": _each_copied(messages.StepReport, told.steps)}
        case pb.Finished():
            given = {"metrics": dict(told.metrics)}
        case pb.Failed():
            given = {"users": told.cause == pb.Failed.USER}
        case _:
            given = {}
    return events.FromWorker(worker_id, _copied(getattr(messages, type(told).__name__), told, **given))


def to_message(order: messages.Order) -> pb.MasterMessage:
    """It is the same for all workers that are told."""
    return pb.MasterMessage(**{_BODIES[type(order).__name__]: _values(order)})


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
    if notice.event not in _FORMS:
        raise ValueError(f"a worker has no notice {notice.event!r} to give")
    # A file's name may have bytes that are no UTF-8. Python keeps such a byte as a lone surrogate, which can't be sent on.
    encodable = json.dumps(json.loads(notice.fields_json or "{}"), ensure_ascii=False).encode(errors="replace")
    try:
        form = _FORMS[notice.event].model_validate(json.loads(encodable))
    except ValidationError as error:
        raise ValueError(f"notice {notice.event}: {first_finding(error)}") from None
    return form.model_dump(exclude_unset=True)
