"""The table of suspicions: from when each counts, who is asked where the worker stands, and what is shown to people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticdl.master.state.suspicion import StackReport, Suspicion, SuspicionKind
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord

_K = SuspicionKind


@dataclass(frozen=True, slots=True)
class Row:
    """Of one kind of suspicion."""

    since: Callable[[WorkerRecord, Settings, float], float]  # when it began; now, if that is not known
    asks: bool = True  # it, or else its launcher, where it stands
    asks_worker: bool = True  # first, if it has a session
    shown: bool = True  # beside the worker from the first moment on, not only once it is named
    is_news: Callable[[Suspicion, StackReport], bool] = lambda suspicion, report: True  # then the worker is named


def _moved(record: WorkerRecord, settings: Settings, now: float) -> float:
    return record.pulse.moved if record.pulse else now


def _quiet(record: WorkerRecord, settings: Settings, now: float) -> float:
    return now if record.quiet_since is None else record.quiet_since


TABLE: Mapping[SuspicionKind, Row] = {
    _K.STUCK: Row(_moved, shown=False, is_news=lambda suspicion, report: suspicion.is_due or not report.moves),
    # Only who differs from the others is named. A hang of which nobody is to blame is no remark about one member.
    _K.WAITS: Row(_moved, shown=False, is_news=lambda suspicion, report: False),
    _K.LATE: Row(lambda record, settings, now: (record.deadline or now) - settings.start_timeout),
    _K.SILENT: Row(
        lambda record, settings, now: record.pulse.heard if record.pulse else now,
        asks_worker=False,
        is_news=lambda suspicion, report: suspicion.named is not None,
    ),
    # It may be importing, which is no news; if it does not reach its master, its own log says so.
    _K.UNREACHED: Row(_quiet, asks=False, is_news=lambda suspicion, report: False),
    _K.ABSENT: Row(_quiet),
    _K.OVER: Row(_quiet),
}
