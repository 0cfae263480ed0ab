"""Between protobuf and the core's dataclasses: protobuf messages go no further inward than this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import assert_never

from elasticdl.master.core import events as e
from elasticdl.master.core import instructions as i
from elasticdl.master.core.job import Job
from elasticdl.proto import elasticdl_pb2 as pb

# What a worker may have written into the journal: the rest is the master's to say.
_NOTICES: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "evaluation": {"step": int, "epoch": int, "samples": int, "metrics": dict},
    "checkpoint": {"step": int, "path": str, "seconds": (int, float)},
    "checkpoint_failed": {"step": int, "path": str, "reason": str},
    "resumed": {"step": int, "epoch": int, "samples": int, "path": str},
    "exported": {"path": str},
    "warning": {"message": str},
}
_LARGEST = {"epoch": 2**31 - 1}  # integers that the status takes; others have 64 bits
_PAUSES = ("grow", "shrink", "failure")
ToWorkers = i.AnnounceChange | i.BreakWorld | i.PublishWorld | i.DrainWorker | i.StopWorkers | i.DumpStacks


def connected(hello: pb.Hello) -> e.WorkerConnected:
    members = tuple(i.Member(m.worker_id, m.host, m.step, m.has_state, m.epoch) for m in hello.members)
    return e.WorkerConnected(hello.worker_id, hello.host, hello.pid, hello.world_version, hello.step, members)


def to_event(worker_id: int, message: pb.WorkerMessage) -> e.Event:
    """What a message inside a session means.

    Raises:
        ValueError: the message means nothing here, or its notice is none that a worker may give.
    """
    match message.WhichOneof("body"):
        case "heartbeat":
            beat = message.heartbeat
            return e.HeartbeatReceived(worker_id, beat.world_version, beat.step, beat.progress, beat.waiting)
        case "ask":
            ask = message.ask
            return e.JoinRequested(
                worker_id, ask.left_world, ask.step, ask.has_state, ask.broken, ask.reason, ask.epoch
            )
        case "draining":
            return e.WorkerDraining(worker_id, message.draining.reason, message.draining.lingers)
        case "progress":
            return _progress(worker_id, message.progress)
        case "pause":
            return e.PauseReported(worker_id, _pause(message.pause))
        case "finished":
            done = message.finished
            return e.WorkerFinished(worker_id, done.step, done.epochs, dict(done.metrics), done.together)
        case "failed":
            cause = e.FailureCause.USER if message.failed.cause == pb.Failed.USER else e.FailureCause.WORKER
            return e.WorkerFailed(worker_id, cause, message.failed.message, message.failed.traceback)
        case "notice":
            return _notice(worker_id, message.notice)
        case other:
            raise ValueError(f"a session does not take {other or 'an empty message'} here")


def to_message(instruction: ToWorkers) -> pb.MasterMessage:
    match instruction:
        case i.AnnounceChange(_, version, reason):
            return pb.MasterMessage(change=pb.Change(world_version=version, reason=reason))
        case i.BreakWorld(_, version, reason):
            return pb.MasterMessage(broken=pb.Broken(world_version=version, reason=reason))
        case i.PublishWorld(world):
            members = [
                pb.Member(worker_id=m.worker_id, host=m.host, step=m.step, has_state=m.has_state, epoch=m.epoch)
                for m in world.members
            ]
            return pb.MasterMessage(world=pb.World(version=world.version, members=members, reason=world.reason))
        case i.DrainWorker(_, reason):
            return pb.MasterMessage(drain=pb.Drain(reason=reason))
        case i.StopWorkers(_, reason, checkpoint):
            return pb.MasterMessage(stop_work=pb.StopWork(reason=reason, checkpoint=checkpoint))
        case i.DumpStacks():
            return pb.MasterMessage(dump_stacks=pb.DumpStacks())
        case never:
            assert_never(never)


def to_status(job_name: str, job: Job, now: float, elapsed: float) -> pb.JobStatus:
    view, training = job.view(), job.training
    return pb.JobStatus(
        job_name=job_name,
        phase=str(view.phase),
        reason=view.reason,
        traceback=view.traceback,
        world_version=view.world_version,
        workers=[
            pb.WorkerStatus(worker_id=w.worker_id, state=w.state, rank=w.rank, host=w.host, pid=w.pid, reason=w.reason)
            for w in view.workers
        ],
        last_change=view.last_change,
        epoch=training.epoch,
        total_epochs=training.total_epochs,
        step=training.step,
        total_steps=training.total_steps,
        loss=training.loss,
        samples=training.samples,
        samples_per_second=training.samples_per_second(now),
        time_left=training.time_left(now),
        elapsed=elapsed,
        min_workers=view.limits.minimum,
        max_workers=view.limits.maximum,
        metrics=training.metrics,
    )


def _progress(worker_id: int, progress: pb.Progress) -> e.ProgressReported:
    steps = tuple(map(_step, progress.steps))
    return e.ProgressReported(worker_id, steps, progress.total_steps, progress.total_epochs)


def _step(step: pb.StepReport) -> e.StepReport:
    return e.StepReport(
        step=step.step,
        epoch=step.epoch,
        loss=step.loss,
        samples=step.samples,
        learning_rate=step.learning_rate,
        seconds=step.seconds,
        world_version=step.world_version,
        total_samples=step.total_samples,
        ends_epoch=step.ends_epoch,
    )


def _pause(pause: pb.Pause) -> dict[str, object]:
    if pause.kind not in _PAUSES:
        raise ValueError(f"a pause is of the kind {', '.join(_PAUSES)}, not {pause.kind!r}")
    return {
        "world": pause.world_version,
        "kind": pause.kind,
        "notice": pause.notice,
        "drain": pause.drain,
        "rendezvous": pause.rendezvous,
        "init": pause.init,
        "sync": pause.sync,
        "first_step": pause.first_step,
        "total": pause.total,
        "steps_torn": pause.steps_torn,
    }


def _notice(worker_id: int, notice: pb.Notice) -> e.NoticeReported:
    kinds = _NOTICES.get(notice.event)
    if kinds is None:
        raise ValueError(f"a worker has no notice {notice.event!r} to give")
    fields = json.loads(notice.fields_json or "{}")
    if not isinstance(fields, dict):
        raise ValueError(f"the fields of a notice must be a JSON object, not {notice.fields_json!r}")
    for name, value in fields.items():
        if name not in kinds or not isinstance(value, kinds[name]):
            raise ValueError(f"a notice {notice.event} does not have {name}={value!r}")
    metrics = fields.get("metrics", {})
    if not all(isinstance(metric, int | float) for metric in metrics.values()):
        raise ValueError(f"metrics must be numbers, not {metrics!r}")
    for name, value in {**fields, **metrics}.items():
        most = _LARGEST.get(name, 2**63 - 1)
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(f"{name} of a notice must be at most {most}, not {value}")
    return e.NoticeReported(worker_id, notice.event, fields)
