"""The journal of a job: what happened, one JSON object a line, appended and never changed.

Each entry has ``number``, ``time`` (seconds since the epoch) and ``event``; `elasticdl.job.journal` says what else. An entry
that a worker has told also has ``worker``, the worker in whose session it came. Numbers grow, but not by one: a master that takes over
begins beyond all that the last one may have told and not saved. Before format 1.2 there were none.

Status pages, plots, summaries and benchmarks are all made from the journal.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, OnErrorOmit, PlainValidator, ValidationError, create_model
from pydantic_core import to_jsonable_python

# The fields of an entry as values that can be trusted: a journal may be of another version, damaged, or made up.

LONGEST_TEXT = 2000
MOST = 1e15  # seconds, steps, samples: a larger number is made up, and a browser can't count with it
Whole = Annotated[int, Field(gt=-MOST, lt=MOST)]
Count = Annotated[int, Field(ge=0, lt=MOST)]
Seconds = Annotated[float, Field(ge=0, lt=MOST)]
Number = Annotated[float, Field(allow_inf_nan=False)] | None
Text = Annotated[str, PlainValidator(lambda value: ("" if value is None else str(value))[:LONGEST_TEXT])]


class SpeedupRow(BaseModel):
    """A row of ``curve``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    workers: Seconds
    speedup: Seconds
    measured: bool = False


class Fields(BaseModel):
    """Of an entry of any kind (`elasticdl.job.journal`). What it lacks, and what makes no sense, is as here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    time: Seconds = 0.0
    event: Text = ""
    worker: Whole | None = None
    code: Whole | None = None
    members: list[OnErrorOmit[Whole]] = []
    world: Count = 0
    step: Count = 0
    steps: Count = 0
    steps_torn: Count = 0
    epochs: Count = 0
    again: Count = 0
    samples: Count = 0
    compared: Count = 0
    compared_workers: Count = 0
    seconds: Seconds = 0.0
    held: Seconds = 0.0
    factor: Seconds = 0.0
    slowest: Seconds = 0.0
    # Of a pause: its parts, and their sum.
    notice: Seconds = 0.0
    drain: Seconds = 0.0
    rendezvous: Seconds = 0.0
    init: Seconds = 0.0
    sync: Seconds = 0.0
    first_step: Seconds = 0.0
    total: Seconds = 0.0
    loss: Number = None
    learning_rate: Number = None
    metrics: dict[str, Number] = {}
    curve: list[OnErrorOmit[SpeedupRow]] = []
    replaces: bool = False
    checkpoint: bool = False
    job: Text = ""
    workers: Text = ""
    phase: Text = ""
    path: Text = ""
    reason: Text = ""
    message: Text = ""
    engine: Text = ""
    collective: Text = ""
    text: Text = ""
    host: Text = ""
    cause: Text = ""
    kind: Text = ""
    state: Text = ""
    where: Text = ""
    differs: Text = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(entry)
        except ValidationError as error:
            wrong = {finding["loc"][0] for finding in error.errors()}
            return cls.model_validate({name: value for name, value in entry.items() if name not in wrong})

    @property
    def standing(self) -> str:
        """Of a stuck worker."""
        return standing(vars(self))[:LONGEST_TEXT]

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these fields that the entry has."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


# What can happen to a job: each kind of entry of its journal, with all that other parts need to know of it.

AnyEntry = Mapping[str, Any]
# The version of the journal's format, which the first entry, `job_started`, tells.
FORMAT = "1.2"
SELDOM_SECONDS = 10.0
PAUSE_PARTS = ("notice", "drain", "rendezvous", "init", "sync", "first_step")
PAUSE_TIMES = (*PAUSE_PARTS, "total")
# Of which type a field is that a worker gives. The status takes epochs of 32 bits, and everything else takes 64.
_COUNT = Annotated[int, Field(ge=0, le=2**63 - 1)]
_EPOCH = Annotated[int, Field(ge=0, le=2**31 - 1)]
_SECONDS = _COUNT | float
_LINES = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100)]
_NUMBER = Annotated[int, Field(gt=-(2**63), lt=2**63)] | float
_NUMBERS = dict[str, _NUMBER]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of entry. ``fields``: what each field means; an entry has those that are known."""

    name: str
    fields: Mapping[str, str]
    level: int = logging.INFO  # in the master's log
    said: str = ""  # a line for a person, see `line`; empty: only for the record
    quiet: bool = False  # whoever watches the job sees it otherwise, as in its status
    seldom: bool = False  # many may come each second: a screen shows some (`Seldom`)
    marked: bool = False  # the report shows it as an event
    ends_steps: bool = False  # the steps so far are written with it
    # The types of the fields that a worker may give; if there are none, only the master makes such entries.
    of_worker: Mapping[str, Any] = field(default_factory=dict)
    scalars: Callable[[AnyEntry], Mapping[str, Any]] | None = None  # for TensorBoard

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
         said="asking for {wanted}", quiet=True),
    Kind("master_restarted", {"world": "that it has found", "members": "of it", "missing": "workers that were expected and have not come",
         "seconds": "until it knew"}, said="a new master has taken over at world {world}{lost}", quiet=True, marked=True, ends_steps=True),
    Kind("worker_launched", {**_WORKER, "reason": "", "replaces": "whether it takes the place of one that left"}),
    Kind("worker_pending", {**_WORKER, "reason": "asked for, but there is no place for it yet"},
         said="worker {worker} is pending{because}", quiet=True),
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
         said="worker {worker} left{because}"),
    Kind("change_announced", {"world": "whose members will leave it after their step", "reason": ""}),
    Kind("world_broken", {"world": "whose members leave it at once, as one is gone", "reason": ""}, ends_steps=True),
    Kind("world_formed", {"world": "", "members": "workers in rank order", "step": "with which it begins", "reason": "",
         "seconds": "since forming began"}, said="world {world}: {who}{since}: {reason}", ends_steps=True),
    Kind("pause", {**_WORKER, "world": "new one", "kind": "grow, shrink or failure", **dict.fromkeys(PAUSE_PARTS, "seconds"), "total": "seconds",
         "steps_torn": ""}, scalars=lambda entry: {f"pause/{part}": entry[part] for part in PAUSE_TIMES if part in entry},
         of_worker={"world": _COUNT, "kind": Literal["grow", "shrink", "failure"], "steps_torn": _COUNT, **dict.fromkeys(PAUSE_TIMES, _SECONDS)}),
    Kind("evaluation", {**_WORKER, **_STEP, "epoch": "", "samples": "", "metrics": "", "seconds": ""}, said="evaluation at step {step}: {measured}",
         seldom=True, marked=True, of_worker={"step": _COUNT, "epoch": _EPOCH, "samples": _COUNT, "metrics": _NUMBERS, "seconds": _SECONDS},
         scalars=lambda entry: {f"evaluation/{name}": value for name, value in entry.get("metrics", {}).items()}),
    Kind("checkpoint", {**_WORKER, **_STEP, "path": "", "seconds": "to write it", "held": "seconds of these, and of copying, that training stood still"},
         said="checkpoint at step {step}: {path}", marked=True, of_worker={"step": _COUNT, "path": str, "seconds": _SECONDS, "held": _SECONDS}),
    Kind("checkpoint_failed", {**_WORKER, **_STEP, "path": "", "reason": ""}, logging.WARNING, "warning: no checkpoint at step {step}: {reason}",
         marked=True, of_worker={"step": _COUNT, "path": str, "reason": str}),
    Kind("collective", {**_WORKER, "engine": "what sums gradients over workers: horovod or torch"}, of_worker={"engine": str}),
    Kind("resumed", {**_WORKER, **_STEP, "epoch": "", "samples": "", "path": ""}, said="resumed at step {step} from {path}", marked=True,
         of_worker={"step": _COUNT, "epoch": _EPOCH, "samples": _COUNT, "path": str}),
    Kind("predicted", {**_WORKER, "samples": "", "path": ""}, said="predictions of {samples} samples written to {path}", marked=True,
         of_worker={"samples": _COUNT, "path": str}),
    Kind("exported", {**_WORKER, "path": ""}, said="model written to {path}", marked=True, of_worker={"path": str}),
    Kind("worker_slow", {**_WORKER, "host": "", "phase": "data, compute or update", "factor": "of the median worker's",
         "seconds": "a step, by which the others wait"}, logging.WARNING,
         "worker {worker} on {host} is slow: {factor:.3g}x the others ({phase}), who wait {seconds:.2g} s a step for it", marked=True),
    Kind("worker_recovered", _WORKER, said="worker {worker} is no longer slow", marked=True),
    Kind("warning", {**_WORKER, "message": ""}, logging.WARNING, "warning: {message}", marked=True, of_worker={"message": str}),
    Kind("epoch_finished", {"epoch": "from 0", **_STEP, "loss": "mean over its samples, as far as rank 0 could report them",
         "compared": "the step after which the workers' states were compared last", "compared_workers": "of how many they were one"},
         said="epoch {counted} finished: step {step}, mean loss {loss}", seldom=True, marked=True),
    Kind("scale_requested", {"workers": "asked for from now on"}, said="asked for {wanted}", marked=True),
    Kind("advice", {"text": "", "curve": "[{workers, speedup (of one worker), measured (else an estimate)}]"},
         said="scaling: {text}"),
    Kind("decision", {"workers": "that the job wants from now on", "reason": ""}, said="scaling: {reason}", marked=True),
    Kind("stop_requested", {"reason": "", "checkpoint": "whether one is wanted"}, marked=True),
    Kind("phase", {"phase": "", "reason": ""}, said="the job is {phase}{because}", quiet=True, marked=True, ends_steps=True),
    Kind("steps_over", {**_WORKER, **_STEP, "seconds": "since its last step, evaluation or checkpoint, in which a script did something else"},
         ends_steps=True, of_worker={"step": _COUNT, "seconds": _SECONDS}),
    Kind("steps", {"step": "the last", "world": "", "steps": "how many", "samples": "", "loss": "mean over samples", "learning_rate": "",
         "seconds": "", "again": "how many of them were made before",
         "slowest": "seconds a step that members waited for the slowest, mean"}, logging.DEBUG),
    Kind("job_finished", {"phase": "", "reason": "", "steps": "", "epochs": "", "samples": "", "metrics": "", "collective": "",
         "compared": "as of `epoch_finished`", "compared_workers": ""}, said="the job has {phase}{because}", quiet=True),
)  # fmt: skip
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def standing(entry: AnyEntry) -> str:
    """Where the worker of an entry ``worker_stuck`` stands, for people; empty if nothing is known."""
    where = entry.get("where")
    parts = (entry.get("state"), where and f"at {where}", entry.get("differs"))
    return ", ".join(str(part) for part in parts if part)


def news(entry: AnyEntry) -> str | None:
    """A line for somebody who watches the job; None if the entry is only for the record."""
    kind = KINDS.get(entry.get("event", ""))
    if kind is None or kind.quiet or not kind.said or (kind.name == "worker_left" and not entry.get("code")):
        return None
    return line(kind, entry)


class Seldom:
    """Which entries a screen leaves out: of each kind of which many may come it shows the first, and then one in ten seconds."""

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}  # when the last of each kind happened that was shown

    def leaves_out(self, entry: AnyEntry) -> bool:
        kind, time = KINDS.get(entry["event"]), entry["time"]
        if kind is None or not kind.seldom:
            return False
        # A negative time has passed where the next master's clock is behind.
        if 0 <= time - self._shown.get(kind.name, -math.inf) < SELDOM_SECONDS:
            return True
        self._shown[kind.name] = time
        return False


def line(kind: Kind, entry: AnyEntry) -> str:
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


# The line that a worker prints as it enters a world: `[elasticdl TIME] worker 3 is rank 0 in world 5`.
#
# It stands in the worker's own output, wherever that goes: in a file or in the log of a pod. By these marks it is known what was printed
# under which rank, and about when. Only who reads that output himself sees them: the commands leave them out.

_FORM = r"\[elasticdl ([\d.: -]{23})\] worker (\d{1,18}) is rank (\d{1,18}) in world (\d{1,18})"
_MARK = re.compile(rf"{_FORM}\n".encode())
_IN_TEXT = re.compile(rf"{_FORM}\n")
_END_OF_LINE = re.compile(rf"{_FORM}\Z")
_LONGEST = 128
_BEGINNING = b"[elasticdl "


class WorldMark(NamedTuple):
    when: str  # as `2026-01-31 23:59:59.123`, by the clock of the worker's machine
    worker: int
    rank: int
    world: int

    def to_line(self) -> bytes:
        return f"[elasticdl {self.when}] worker {self.worker} is rank {self.rank} in world {self.world}\n".encode()


def split_at_mark(printed: bytes) -> tuple[bytes, WorldMark | None, bytes]:
    """What comes before the first mark, that mark, and the rest. Without a mark the rest may be the beginning of one."""
    if found := _MARK.search(printed):
        return printed[: found.start()], _mark(*(each.decode() for each in found.groups())), printed[found.end() :]
    at = max(printed.rfind(b"["), printed.rfind(b"\n") + 1, len(printed) - _LONGEST)
    begun = printed[at : at + len(_BEGINNING)]
    if begun and _BEGINNING.startswith(begun):
        return printed[:at], None, printed[at:]
    return printed, None, b""


def unmarked(line: str) -> tuple[str | None, WorldMark | None]:
    """A line of a log, without its end: what there is of it but for a mark, with which it may end, and that mark."""
    if (found := _END_OF_LINE.search(line)) is None:
        return line, None
    return line[: found.start()] or None, _mark(*found.groups())


def without_marks(text: str) -> str:
    return _IN_TEXT.sub("", text)


def _mark(when: str, *numbers: str) -> WorldMark:
    return WorldMark(when, *map(int, numbers))


Entry = dict[str, Any]

STEPS = "steps"
_DIGITS = 6  # of a number of `Steps`: a person reads no more, and there are many entries
LATEST = 2.5e11  # seconds since the epoch: the year 9892


def dump_entry(entry: Entry) -> str:
    return json.dumps(plain(entry), separators=(", ", ": "), allow_nan=False)


def plain(value: Any) -> Any:
    """The value as JSON can say it: a number that is none (NaN, infinity) becomes null."""
    return to_jsonable_python(value, inf_nan_mode="null")


def parse_entry(line: str) -> Entry | None:
    """None if the line is no entry: a disk may have been full, or somebody else may have written there."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    time = entry.get("time")
    if not isinstance(time, int | float) or isinstance(time, bool):
        return None
    return entry if 0 <= time < LATEST else None


def number_of(line: str) -> int:
    """0 if the line is no entry, or of a format without numbers."""
    number = (parse_entry(line) or {}).get("number")
    return number if type(number) is int else 0


def read_journal(path: Path) -> Iterator[Entry]:
    """Every whole entry of a journal file; a last line that is still being written is left out, and so are damaged ones."""
    with path.open(errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and (entry := parse_entry(line)) is not None:
                yield entry


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one world, one after the other: an entry ``steps``. Loss and learning rate are None where they are not known."""

    step: int  # the last of them
    world: int
    steps: int
    samples: int
    loss: float | None
    learning_rate: float | None
    seconds: float
    again: int  # of them had been made before
    slowest: float  # seconds a step that members waited for the slowest, mean

    @classmethod
    def of(cls, told: Fields, **more: Any) -> Self:
        return cls(**{name: getattr(told, name) for name in _NAMES}, **more)

    def __add__(self, later: Self) -> Self:
        """These and the steps that follow, as one. A loss that is not known counts for nothing."""
        steps, samples = self.steps + later.steps, self.samples + later.samples
        loss = later.loss if self.loss is None else self.loss
        if self.loss is not None and later.loss is not None:
            loss = (self.loss * self.samples + later.loss * later.samples) / samples if samples else later.loss
        return replace(
            later,
            steps=steps,
            samples=samples,
            loss=loss,
            seconds=self.seconds + later.seconds,
            again=self.again + later.again,
            slowest=(self.slowest * self.steps + later.slowest * later.steps) / steps if steps else later.slowest,
        )

    def fields(self) -> dict[str, Any]:
        """For an entry, and for a snapshot."""
        return {name: _short(getattr(self, name)) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Steps))


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
