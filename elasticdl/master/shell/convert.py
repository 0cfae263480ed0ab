"""Between protobuf and the core's dataclasses, whose fields have the same names: messages go no further inward than this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from elasticdl.job.event_catalogue import KINDS
from elasticdl.master.core.job import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.proto import elasticdl_pb2 as pb

_MOST_LINES, _MOST_OF_LINE = 100, 1000  # of a list in a notice
_LARGEST = {"epoch": 2**31 - 1}  # integers that the status takes; others have 64 bits
_PAUSES = ("grow", "shrink", "failure")
_MEMBER, _STEP = attrgetter(*i.Member.__match_args__), attrgetter(*e.StepReport.__match_args__)
_TIMES = attrgetter(*e.StepTimes.__match_args__)
_TOLD: Mapping[type[i.Instruction], str] = {
    i.AnnounceChange: "change",
    i.BreakWorld: "broken",
    i.PublishWorld: "world",
    i.DrainWorker: "drain",
    i.StopWorkers: "stop_work",
    i.DumpStacks: "dump_stacks",
    i.TellLearnt: "learnt",
}


def connected(hello: pb.Hello) -> e.WorkerConnected:
    members = tuple(i.Member(*_MEMBER(member)) for member in hello.members)
    return e.WorkerConnected(hello.worker_id, hello.host, hello.pid, hello.world_version, hello.step, members)


def to_event(worker_id: int, message: pb.WorkerMessage) -> e.Event:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    body = message.WhichOneof("body")
    match body:
        case "heartbeat":
            beat = message.heartbeat
            times = e.StepTimes(*_TIMES(beat.times)) if beat.HasField("times") else None
            return e.HeartbeatReceived(
                worker_id, beat.world_version, beat.step, beat.progress, beat.waiting, times, beat.ending
            )
        case "ask":
            ask = message.ask
            where = (ask.left_world, ask.step, ask.has_state)
            return e.JoinRequested(worker_id, *where, ask.broken, ask.reason, ask.epoch, ask.synced_in)
        case "draining":
            return e.WorkerDraining(worker_id, message.draining.reason, message.draining.lingers)
        case "progress":
            told = message.progress
            steps = tuple(e.StepReport(*_STEP(step)) for step in told.steps)
            return e.ProgressReported(worker_id, steps, told.total_steps, told.total_epochs)
        case "finished":
            done = message.finished
            return e.WorkerFinished(worker_id, done.step, done.epochs, dict(done.metrics), done.together)
        case "failed":
            failed = message.failed
            users = failed.cause == pb.Failed.USER
            return e.WorkerFailed(worker_id, users, failed.message, failed.traceback, trained=failed.trained)
        case "pause":
            return e.NoticeReported(worker_id, "pause", _pause(message.pause), message.number)
        case "notice":
            return e.NoticeReported(worker_id, message.notice.event, _notice(message.notice), message.number)
    raise ValueError(f"a session does not take {body or 'an empty message'} here")


def to_message(instruction: i.Instruction) -> pb.MasterMessage:
    """For an instruction that is carried out by workers."""
    name = _TOLD[type(instruction)]
    what = instruction.world if isinstance(instruction, i.PublishWorld) else instruction
    fields = getattr(pb.MasterMessage(), name).DESCRIPTOR.fields
    values: dict[str, Any] = {field.name: getattr(what, field.name) for field in fields}
    if isinstance(instruction, i.PublishWorld):
        values["members"] = [_values(member) for member in instruction.world.members]
    return pb.MasterMessage(**{name: values})


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


def _values(said: object) -> dict[str, Any]:
    """The fields of one of the core's values."""
    return {name: getattr(said, name) for name in said.__match_args__}  # type: ignore[attr-defined]


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
    fields = {name: _encodable(value) for name, value in fields.items()}
    for name, value in fields.items():
        if name not in kinds or not isinstance(value, kinds[name]):
            raise ValueError(f"a notice {notice.event} does not have {name}={value!r}")
        if isinstance(value, list):
            _require_lines(notice.event, name, value)
    metrics = fields.get("metrics", {})
    if not all(isinstance(metric, int | float) for metric in metrics.values()):
        raise ValueError(f"metrics must be numbers, not {metrics!r}")
    for name, value in {**fields, **metrics}.items():
        most = _LARGEST.get(name, 2**63 - 1)
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(f"{name} of a notice must be at most {most}, not {value}")
    return fields


def _encodable(value: Any) -> Any:
    """A file's name may have bytes that are no UTF-8: Python has them as halves of characters, which can't be sent on."""
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _require_lines(event: str, name: str, lines: list[object]) -> None:
    if len(lines) > _MOST_LINES or not all(isinstance(line, str) and len(line) <= _MOST_OF_LINE for line in lines):
        raise ValueError(
            f"{name} of a notice {event} must be at most {_MOST_LINES} lines of {_MOST_OF_LINE} characters"
        )
