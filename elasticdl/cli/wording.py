"""How numbers, statuses, journal entries and logs read: pure functions that return text."""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from google.protobuf import json_format

from elasticdl.job.event_catalogue import metrics_text, plural
from elasticdl.job.history import History
from elasticdl.job.job_facts import JobFacts
from elasticdl.job.jobdir import STOPPED
from elasticdl.job.journal import Entry
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

LATEST = "~"  # later than any moment
# A reason that is longer than the first is shown once; after that its beginning. So many are remembered.
LONG_REASON, BEGINNING, REASONS = 100, 60, 16
_WHOLE = ("world_version", "step", "total_steps", "samples", "compared_step")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


class Once:
    """Shows a long reason once: where it comes again, with other numbers or within another, its beginning stands for it."""

    def __init__(self) -> None:
        self._told: deque[re.Pattern[str]] = deque(maxlen=REASONS)

    def __call__(self, text: str, *reasons: object) -> str:
        """``reasons``: the parts of the text that may come again; all of it, if none is given."""
        for told in self._told:
            text = told.sub(lambda found: f"{found[0][:BEGINNING]}... (as above)", text)
        for reason in map(str, reasons or (text,)):
            if len(reason) > LONG_REASON and reason in text:
                self._told.append(re.compile(re.sub(r"\d+", r"\\d+", re.escape(reason))))
        return text


def duration(seconds: float) -> str:
    """As ``1:02:03``; ``?`` when it is not known."""
    if seconds < 0 or not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def insists(spec: JobSpec, name: str, flags: str = "") -> str:
    """A line after another, for a job that begins and was given a single number of workers: how it goes on with fewer."""
    least, most = spec.num_workers.minimum, spec.num_workers.maximum
    if spec.gang or not 1 < least == most:
        return ""
    go_on = f"`elasticdl scale {name}{flags} 1-{most}` lets it go on with fewer"
    return f"\nit waits whenever fewer than {most} workers are ready (--num_workers {most}); {go_on}"


def count_of(done: int, total: int) -> str:
    return f"{done:,}/{total:,}" if total else f"{done:,}"


def epoch_text(status: pb.JobStatus) -> str:
    """The epoch as people count, from 1; ``-`` of a job of which only the step is known."""
    if status.step and not (status.epoch or status.total_epochs or status.samples or status.total_steps):
        return "-"
    return count_of(min(status.epoch + 1, status.total_epochs or status.epoch + 1), status.total_epochs)


_STATES = {"member": "trains", "standby": "ready", "draining": "leaves"}  # other states are words that people know


def state_text(worker: pb.WorkerStatus, phase: str) -> str:
    """``phase``: of its job; members of a world that waits for others train no more."""
    is_waiting = worker.state == "member" and phase == "waiting"
    return phase if is_waiting else _STATES.get(worker.state, worker.state)


def worker_line(worker: pb.WorkerStatus, once: Once, phase: str = "running") -> str:
    """A worker, for output that is not a terminal."""
    rank = f", rank {worker.rank}" if worker.rank >= 0 else ""
    process = f", pid {worker.pid}{f' on {worker.host}' if worker.host else ''}" if worker.pid > 0 else ""
    because = once(why(worker))
    return f"worker {worker.worker_id}: {state_text(worker, phase)}{rank}{process}{f': {because}' if because else ''}"


def members(status: pb.JobStatus) -> list[pb.WorkerStatus]:
    """The workers that train, in rank order."""
    training = (worker for worker in status.workers if state_text(worker, status.phase) == _STATES["member"])
    return sorted(training, key=lambda worker: worker.rank)


def waiting_lines(status: pb.JobStatus) -> dict[str, str]:
    """What workers without a place wait for, a line for each reason, by a key that does not change with its numbers."""
    waiting: dict[str, list[pb.WorkerStatus]] = {}
    for worker in status.workers:
        if worker.state == "pending" and worker.reason:
            waiting.setdefault(re.sub(r"\d+", "#", worker.reason), []).append(worker)
    lines = {}
    for key, workers in waiting.items():
        ids = ", ".join(str(worker.worker_id) for worker in workers)
        who = f"workers {ids} wait" if workers[1:] else f"worker {ids} waits"
        lines[key] = f"{who}: {workers[0].reason}"
    return lines


def finding_lines(status: pb.JobStatus) -> list[str]:
    """How the job scales, and what follows from it; when the workers' states were last seen to be one."""
    lines = [f"scaling: {said}" for said in (status.advice, status.decision) if said]
    if workers := status.compared_workers:
        lines.append(f"all {workers} workers held the same state after step {status.compared_step:,}")
    return lines


def facts(status: pb.JobStatus) -> dict[str, str]:
    """Of a job among others, by the titles of columns."""
    goes_on = status.max_workers and not is_over(status)
    return {
        "phase": status.phase,
        "workers": f"{len(members(status))} of {wanted_workers(status)}" if goes_on else "",
        "step": count_of(status.step, status.total_steps),
        "elapsed": duration(status.elapsed),
        "reason": status.reason,
    }


def status_json(status: pb.JobStatus) -> str:
    """In one line, with every field. Protobuf's own form has large whole numbers as text."""
    found = json_format.MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps({name: int(value) if name in _WHOLE else value for name, value in found.items()})


def wanted_workers(status: pb.JobStatus) -> str:
    if status.min_workers == status.max_workers:
        return str(status.min_workers)
    return f"{status.min_workers}-{status.max_workers}"


def is_over(status: pb.JobStatus) -> bool:
    return status.phase in ("succeeded", "failed", "stopped")


def progress_line(status: pb.JobStatus) -> str:
    """How far a job is, for output that is not a terminal."""
    parts = [f"epoch {epoch_text(status)}", f"step {count_of(status.step, status.total_steps)}"]
    if status.samples and (status.samples_per_second or not math.isnan(status.loss)):  # else it has only been resumed
        parts += [f"loss {status.loss:.4g}", f"{status.samples_per_second:,.0f} samples/s"]
    if training := members(status):  # else they are between two worlds, or have finished
        parts.append(plural(len(training), "worker"))
    parts.append(f"elapsed {duration(status.elapsed)}")
    if not is_over(status) and status.time_left >= 0:
        parts.append(f"left {duration(status.time_left)}")
    return ", ".join(parts)


def why(worker: pb.WorkerStatus) -> str:
    """Why it is in its state; before that what is the matter with it."""
    return "; ".join(filter(None, (worker.remark, worker.reason)))


_NOT_SHOWN = ("number", "time", "event", "stack", "curve")  # the curve is long, and for programs


def event_line(entry: Entry, once: Once) -> str:
    """A journal entry for a person: time, event, fields."""
    fields = (f"{key}={_value(value)}" for key, value in entry.items() if key not in _NOT_SHOWN)
    head = f"{moment(entry['time'])}  {entry['event']:17} {'  '.join(fields)}".rstrip()
    head = once(head, *reasons_of(entry))
    stack = entry.get("stack")
    return "\n".join([head, *(f"{'':25}  {line}" for line in (stack if isinstance(stack, list) else ()))])


def reasons_of(entry: Entry) -> list[object]:
    return [entry.get("reason", ""), entry.get("message", "")]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return str(value)


def pauses_text(found: History) -> str:
    """How often training paused and for how long at most; survivors of one change report one pause each."""
    if not found.pauses:
        return "training never paused"
    count = max(found.counts["pauses"], len(found.pauses))
    longest = max(pause.total for pause in found.pauses)
    return (
        f"training paused once, {longest:.2f} s"
        if count == 1
        else f"training paused {count:,} times, {longest:.2f} s at most"
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a training that has ended. ``on_cluster``: there the job's name is taken until it is deleted."""

    status: pb.JobStatus
    found: JobFacts
    on_cluster: bool = False

    @property
    def path(self) -> str:
        """Where it is; empty if nothing is kept."""
        step, path = self.found.checkpoint
        return path if step == self.status.step or self._is_wanted else ""

    @property
    def text(self) -> str:
        """Where it is, and how the training goes on; empty if nobody wanted that."""
        if self.path:
            step = self.found.checkpoint[0]
            of_step = "" if step == self.status.step else f" of step {step:,}"
            return f"kept{of_step} in {self.path}: {self.same_command} goes on from there"
        failed, why = self.found.no_checkpoint
        because = f": {why}" if why and failed == self.status.step else ""
        return f"nothing is kept of it{because}" if self._is_wanted else ""

    @property
    def same_command(self) -> str:
        """In the job's own folder what was kept is found by the name, which may have been drawn."""
        name = self.status.job_name
        after = f"after `elasticdl delete {name}` " if self.on_cluster else ""
        return (
            f"{after}the same command{f', with --job_name {name},' if f'/{name}/{STOPPED.stem}-' in self.path else ''}"
        )

    @property
    def _is_wanted(self) -> bool:
        return bool(self.found.wants_checkpoint and self.status.step)


def stopped_text(kept: Kept) -> str:
    """Who or what has stopped the job, and whether it can go on."""
    reason = kept.status.reason
    goes_on = f"; {kept.same_command} trains on" if kept.path else ""
    return f"job {kept.status.job_name} was stopped{f' ({reason})' if reason else ''}{goes_on}"


def summary_lines(status: pb.JobStatus, found: History, output: str, kept: str) -> list[str]:
    """What a finished job has to show. ``kept``: of one that was stopped."""
    epoch = f"epoch {epoch_text(status)}, " if status.total_epochs else ""
    head = f"job {status.job_name} {status.phase}: {plural(status.step, 'step')}, {epoch}{duration(status.elapsed)}"
    lines = [head]
    made_steps = status.samples and status.step != found.resumed
    if status.phase == "succeeded" and made_steps and not math.isfinite(status.loss):
        lines.append(f"  warning  training has diverged: its last loss is {status.loss}")
    if status.metrics:
        lines.append(f"  metrics  {metrics_text(status.metrics)}")
    lines.append(f"  {pauses_text(found)}")
    if status.phase == "stopped" and kept:
        lines.append(f"  {kept}")
    if output:
        lines.append(f"  output   {output}")
    return lines


def prefix(writer: str) -> str:
    return f"{writer:9} | "


def by_writer(names: Iterable[str]) -> list[str]:
    """The master, then the workers by number."""
    return sorted(names, key=lambda name: (name != "master", len(name), name))


def merged(streams: Iterable[Iterable[tuple[str, str]]]) -> Iterator[str]:
    """The lines of several writers in the order of time. Each writer's lines come in their order, with the moments of `Dating`."""
    return (line for _, line in heapq.merge(*streams, key=lambda item: item[0]))


class Dating:
    """Says when the lines of one log were written, one after the other, as text that sorts by time."""

    def __init__(self) -> None:
        self._last = ""

    def of(self, line: str, earliest: str = "", latest: str = LATEST) -> str:
        """The time that the line begins with, if it was written then: between these moments. Else the first moment that it may be."""
        found = _TIMESTAMP.match(line)
        told = found[0].replace("T", " ").replace(",", ".") if found else ""
        self._last = max(self._last, told if earliest <= told <= latest else earliest)
        return self._last


def moment(seconds: float) -> str:
    """A time since the epoch as logs have it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
