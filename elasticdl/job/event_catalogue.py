"""What can happen to a job: each kind of entry of its journal, with all that other parts need to know of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

Entry = Mapping[str, Any]
# The version of the journal's format, which the first entry, `job_started`, tells. A reader takes older versions, and the next minor one.
FORMAT = "1.2"
PAUSE_PARTS = ("notice", "drain", "rendezvous", "init", "sync", "first_step")
PAUSE_TIMES = (*PAUSE_PARTS, "total")
# Of which type a field is that a worker gives. The status takes epochs of 32 bits, and everything else takes 64.
_COUNT = Annotated[int, Field(ge=0, le=2**63 - 1)]
_EPOCH = Annotated[int, Field(ge=0, le=2**31 - 1)]
_SECONDS = _COUNT | float
_LINES = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100)]
_NUMBER = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float
_NUMBERS = dict[str, _NUMBER]
_BY_EPOCH = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _NUMBER]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of entry. ``fields``: what each field means; an entry has those that are known."""

    name: str
    fields: Mapping[str, str]
    level: int = logging.INFO  # in the master's log
    said: str = ""  # a line for a person, see `line`; empty: only for the record
    quiet: bool = False  # whoever watches the job sees it otherwise, as in its status
    cluster: bool = False  # it may be an Event of the Job on Kubernetes
    passing: bool = False  # it comes again each epoch: its line is replaced by the next
    marked: bool = False  # the report shows it as an event
    ends_steps: bool = False  # the steps so far are written with it
    # The types of the fields that a worker may give; if there are none, only the master makes such entries.
    of_worker: Mapping[str, Any] = field(default_factory=dict)
    scalars: Callable[[Entry], Mapping[str, Any]] | None = None  # for TensorBoard

    @property
    def form(self) -> type[BaseModel]:
        """What a worker has to fill in: it must give what ``said`` names."""
        said = {name for _, name, _, _ in Formatter().parse(self.said)}
        fields: dict[str, Any] = {name: (kind, ... if name in said else None) for name, kind in self.of_worker.items()}
        return create_model(self.name, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


# ---- how numbers read ----


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number_text(value: float | None) -> str:
    """JSON has no word for a number that is none."""
    return "nan" if value is None else f"{value:.4g}"


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))


def _ids(workers: list[Any]) -> str:
    return ", ".join(map(str, workers))


# ---- the catalogue ----

_WORKER = {"worker": "its number"}
_STEP = {"step": "after which"}
_KINDS = (
    Kind("job_started", {"job": "its name", "workers": "asked for, MIN-MAX", "specification": "the file that has it",
         "format": "version of the journal, MAJOR.MINOR"},
         said="asking for {wanted}", quiet=True, cluster=True),
    Kind("master_restarted", {"world": "that it has found", "members": "of it", "missing": "workers that were expected and have not come",
         "seconds": "until it knew"}, said="a new master has taken over at world {world}{lost}", quiet=True, marked=True, ends_steps=True, cluster=True),
    Kind("worker_launched", {**_WORKER, "reason": "", "replaces": "whether it takes the place of one that left"}),
    Kind("worker_pending", {**_WORKER, "reason": "asked for, but there is no place for it yet"},
         said="worker {worker} is pending{because}", quiet=True, cluster=True),
    Kind("worker_started", {**_WORKER, "host": "", "pid": "", "place": "in which it runs: a slot, a pod, a job of Slurm"}),
    Kind("worker_ready", _WORKER),  # warm, waiting to be let in
    Kind("worker_draining", {**_WORKER, "reason": "told to leave, or leaving by itself"}),
    Kind("worker_stuck", {**_WORKER, "host": "", "why": "stuck, not ready, no heartbeat, ...", "seconds": "",
         "state": "of its process, if it can't run; of the master that it tries", "where": "as in train.py:31 in load",
         "differs": "from the others", "stack": "lines"}, logging.WARNING, "worker {worker} on {host}: {why} for {seconds:.0f} s, {standing}",
         marked=True, of_worker={"where": str, "stack": _LINES, "moves": bool, "collectives": _COUNT, "last_collectives": _LINES}),
    Kind("worker_waits", {**_WORKER, "where": "its own code takes long at the start, as in train.py:31 in load", "seconds": ""},
         said="worker {worker} is not ready yet: it has waited for {seconds:.0f} s at {where}", of_worker={"where": str, "seconds": _SECONDS}),
    Kind("worker_left", {**_WORKER, "cause": "", "reason": "", "code": "exit code of its process"},
         said="worker {worker} left{because}", cluster=True),
    Kind("change_announced", {"world": "whose members will leave it after their step", "reason": ""}),
    Kind("world_broken", {"world": "whose members leave it at once, as one is gone", "reason": ""}, ends_steps=True),
    Kind("world_formed", {"world": "", "members": "workers in rank order", "step": "with which it begins", "reason": "",
         "seconds": "since forming began"}, said="world {world}: {who}{since}: {reason}", ends_steps=True, cluster=True),
    Kind("pause", {**_WORKER, "world": "new one", "kind": "grow, shrink or failure", **dict.fromkeys(PAUSE_PARTS, "seconds"), "total": "seconds",
         "steps_torn": ""}, scalars=lambda entry: {f"pause/{part}": entry[part] for part in PAUSE_TIMES if part in entry}),
    Kind("evaluation", {**_WORKER, **_STEP, "epoch": "", "samples": "", "metrics": "", "seconds": ""}, said="evaluation at step {step}: {measured}",
         passing=True, marked=True, of_worker={"step": _COUNT, "epoch": _EPOCH, "samples": _COUNT, "metrics": _NUMBERS, "seconds": _SECONDS},
         scalars=lambda entry: {f"evaluation/{name}": value for name, value in entry.get("metrics", {}).items()}),
    Kind("checkpoint", {**_WORKER, **_STEP, "path": "", "seconds": "to write it", "held": "seconds of these, and of copying, that training stood still"},
         said="checkpoint at step {step}: {path}", marked=True, of_worker={"step": _COUNT, "path": str, "seconds": _SECONDS, "held": _SECONDS}),
    Kind("checkpoint_failed", {**_WORKER, **_STEP, "path": "", "reason": ""}, logging.WARNING, "warning: no checkpoint at step {step}: {reason}",
         marked=True, of_worker={"step": _COUNT, "path": str, "reason": str}),
    Kind("collective", {**_WORKER, "engine": "what sums gradients over workers: horovod or torch"}, of_worker={"engine": str}),
    Kind("epoch_began", {**_WORKER, "epoch": "from 0; of a plain loop", "marks": "by epoch, of the model at its beginning: by these a worker that "
         "comes later knows a checkpoint of the script's own"}, of_worker={"epoch": _EPOCH, "marks": _BY_EPOCH}),
    Kind("resumed", {**_WORKER, **_STEP, "epoch": "", "samples": "", "path": ""}, said="resumed at step {step} from {path}", marked=True,
         of_worker={"step": _COUNT, "epoch": _EPOCH, "samples": _COUNT, "path": str, "learnt": str}),
    Kind("exported", {**_WORKER, "path": ""}, said="model written to {path}", marked=True, of_worker={"path": str}),
    Kind("worker_slow", {**_WORKER, "host": "", "phase": "data, compute or update", "factor": "of the median worker's",
         "seconds": "a step, by which the others wait"}, logging.WARNING,
         "worker {worker} on {host} is slow: {factor:.3g}x the others ({phase}), who wait {seconds:.2g} s a step for it", marked=True),
    Kind("worker_recovered", _WORKER, said="worker {worker} is no longer slow", marked=True),
    Kind("warning", {**_WORKER, "message": ""}, logging.WARNING, "warning: {message}", of_worker={"message": str}),
    Kind("epoch_finished", {"epoch": "from 0", **_STEP, "loss": "mean over its samples, as far as rank 0 could report them",
         "compared": "the step after which the workers' states were compared last", "compared_workers": "of how many they were one"},
         said="epoch {counted} finished: step {step}, mean loss {loss}", passing=True, marked=True),
    Kind("scale_requested", {"workers": "asked for from now on"}, said="asked for {wanted}", marked=True),
    Kind("advice", {"text": "", "curve": "[{workers, speedup (of one worker), measured (else an estimate)}]"},
         said="scaling: {text}"),
    Kind("decision", {"workers": "that the job wants from now on", "reason": ""}, said="scaling: {reason}", marked=True),
    Kind("stop_requested", {"reason": "", "checkpoint": "whether one is wanted"}, marked=True),
    Kind("phase", {"phase": "", "reason": ""}, said="the job is {phase}{because}", quiet=True, marked=True, ends_steps=True,
         cluster=True),
    Kind("steps_over", {**_WORKER, **_STEP, "seconds": "since its last step, evaluation or checkpoint, in which a script did something else"},
         ends_steps=True, of_worker={"step": _COUNT, "seconds": _SECONDS}),
    Kind("steps", {"step": "the last", "world": "", "steps": "how many", "samples": "", "loss": "mean over samples", "learning_rate": "",
         "seconds": "", "again": "how many of them were made before", "waited": "seconds a step that members waited for others, mean",
         "slowest": "of these, those for the slowest"}, logging.DEBUG),
    Kind("job_finished", {"phase": "", "reason": "", "steps": "", "epochs": "", "samples": "", "metrics": "", "collective": "",
         "compared": "when workers' states were compared last"}, said="the job has {phase}{because}", quiet=True, cluster=True),
)  # fmt: skip
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def is_newer(version: str) -> bool:
    """Whether this reader may misread a journal of this version."""
    try:
        major, minor = map(int, version.split("."))
    except ValueError:
        return bool(version)
    ours, newest = map(int, FORMAT.split("."))
    return major > ours or (major == ours and minor > newest + 1)


def standing(entry: Entry) -> str:
    """Where the worker of an entry ``worker_stuck`` stands, for people; empty if nothing is known."""
    where = entry.get("where")
    parts = (entry.get("state"), where and f"at {where}", entry.get("differs"))
    return ", ".join(str(part) for part in parts if part)


def news(entry: Entry) -> str | None:
    """A line for somebody who watches the job; None if the entry is only for the record."""
    kind = KINDS.get(entry.get("event", ""))
    if kind is None or kind.quiet or not kind.said or (kind.name == "worker_left" and not entry.get("code")):
        return None
    return line(kind, entry)


def line(kind: Kind, entry: Entry) -> str:
    """What has happened, in words."""
    ids, missing, reason = entry.get("members", []), entry.get("missing"), entry.get("reason")
    said = {
        "because": f": {reason}" if reason else "",
        "since": f" from step {entry['step']}" if entry.get("step") else "",
        "wanted": f"{entry.get('workers')} worker{'' if str(entry.get('workers')) == '1' else 's'}",
        "who": f"{plural(len(ids), 'worker')} ({_ids(ids)})",
        "lost": f"; workers {_ids(missing)} have not come back" if missing else "",
        "measured": metrics_text(entry.get("metrics", {})),
        "standing": standing(entry) or "at an unknown place: no stack could be had",
        "counted": entry.get("epoch", 0) + 1,
        "loss": number_text(entry.get("loss")),
    }
    return kind.said.format_map(defaultdict(lambda: None, {**entry, **said}))
