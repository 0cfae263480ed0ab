"""What is known of each worker's pod, and what of it is news: every method returns the reports that follow.

Whatever comes twice, late or out of order changes nothing: reports are made from what a pod is, and a worker's end is
reported once. Owned by the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.master.state.events import ExitCause, FoundWorker, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.pods.judge import Ended, Running, Waiting, is_doubtful, judge, judge_end
from elasticdl.places.pods.worker_pods import place_of, worker_id_of

Object = Mapping[str, Any]
Reports = list[WorkerPending | WorkerPlaced | WorkerExited]
# In a container of its own, the first process.
PID = 1
_EVENTS_KEPT = 20
# Of pods that have found no place; one that then takes a worker's is told of by its number alone (1.37).
_WAITING_KEPT = 100
_PREEMPTOR = re.compile(r"Preempted by \w+ ([0-9a-f-]{36})")


@dataclass(slots=True)
class Entry:
    """One worker that is not known to be gone."""

    place: int
    pod: Object | None = None  # as last seen
    gone: bool = False  # the object is, and its end is not yet reported
    held: bool = False  # it has ended, and an event may yet say otherwise, or more
    told: bool = False  # by us, to end
    placed: bool = False
    waits: Waiting | None = None  # as last reported
    events: list[Object] = field(default_factory=list)

    @property
    def leaves(self) -> bool:
        """Whether its pod is being deleted, or is about to be."""
        return self.told or bool(self.pod and self.pod["metadata"].get("deletionTimestamp"))


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._ended: set[int] = set()
        self._waiting: dict[str, Object] = {}  # by uid
        self.ever_placed = False
        self._left: list[int] = []  # workers whose end is reported, and whose pods are still there

    def __contains__(self, worker_id: int) -> bool:
        """Whether a worker was launched or adopted and is not known to be gone."""
        return worker_id in self._entries

    @property
    def workers(self) -> list[int]:
        return sorted(self._entries)

    @property
    def image_trouble(self) -> Waiting | None:
        """Why no worker has ever run, if it is because of the image."""
        if self.ever_placed:  # asked after every change of a pod, of which there may be thousands
            return None
        waits = [entry.waits for entry in self._entries.values() if entry.waits and entry.waits.image]
        return max(waits, key=lambda wait: wait.lasting, default=None)

    def known(self, worker_id: int) -> bool:
        return worker_id in self._entries or worker_id in self._ended

    def unwanted(self, worker_id: int) -> bool:
        """Whether nobody waits for it: its end was reported, or its id is older than one of ours and unknown here."""
        return worker_id not in self._entries and worker_id <= max([*self._entries, *self._ended], default=-1)

    def launch(self, worker_id: int) -> int:
        """Begin an entry; its place is the first that is free, or whose worker is about to leave it."""
        taken = {entry.place for entry in self._entries.values() if not entry.leaves}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        self._entries[worker_id] = Entry(place)
        return place

    def adopt(self, pod: Object) -> None:
        """Begin an entry for a pod that was there before; the core hears of it by other means."""
        entry = self._entries[worker_id_of(pod)] = Entry(place_of(pod), pod)
        verdict = judge(pod, (), told=False)
        entry.placed = isinstance(verdict, Running)
        entry.told = bool(pod["metadata"].get("deletionTimestamp"))
        self.ever_placed = self.ever_placed or entry.placed

    def tell(self, worker_id: int) -> bool:
        """Note that we have it ended; whether there is anything to end."""
        if entry := self._entries.get(worker_id):
            entry.told = True
        return entry is not None

    def take_left(self) -> list[int]:
        """Workers whose end was reported since the last call, and whose pods are still there."""
        left, self._left = self._left, []
        return left

    # ---- what was seen ----

    def refused(self, worker_id: int, reason: str) -> Reports:
        """The cluster does not take the pod, now; it is tried again."""
        entry = self._entries.get(worker_id)
        return self._wait(worker_id, entry, Waiting(reason)) if entry else []

    def never(self, worker_id: int, cause: ExitCause, detail: str) -> Reports:
        """There is no pod and will be none."""
        code = 1 if cause is ExitCause.CRASHED else -9
        return self._end(worker_id, Ended(cause, code, detail)) if worker_id in self._entries else []

    def seen(self, pod: Object) -> Reports:
        worker_id = worker_id_of(pod)
        entry = self._entries.get(worker_id)
        if entry is None or entry.gone:
            return []
        entry.pod = pod
        verdict = judge(pod, self._named(entry.events), told=entry.told)
        if isinstance(verdict, Ended):
            return self._close(worker_id, entry, verdict)
        if pod["metadata"].get("deletionTimestamp"):  # what it still waits for does not matter
            return []
        if isinstance(verdict, Running):
            if entry.placed:
                return []
            entry.placed, entry.waits, self.ever_placed = True, None, True
            return [WorkerPlaced(worker_id, verdict.host, PID, verdict.node)]
        return self._wait(worker_id, entry, verdict)

    def gone(self, worker_id: int, pod: Object | None = None) -> Reports:
        """The pod's object is not there any more; ``pod`` is the last of it."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.gone:
            return []
        entry.pod, entry.gone = pod or entry.pod, True
        if entry.pod is None:
            return self._end(worker_id, Ended(ExitCause.DELETED, -9, "its pod is not there any more"))
        return self._close(worker_id, entry, self._judge_end(entry))

    def created(self, pod: Object) -> Reports:
        """The answer to our request for it, which what was seen since may have overtaken."""
        entry = self._entries.get(worker_id_of(pod))
        return self.seen(entry.pod or pod) if entry else []

    def missing(self, pods: Iterable[Object]) -> list[int]:
        """Workers whose pods were seen and are not among these; they may have come after the list was made."""
        there = {worker_id_of(pod) for pod in pods}
        return [
            number for number, entry in self._entries.items() if entry.pod and not entry.gone and number not in there
        ]

    def happened(self, worker_id: int, event: Object) -> Reports:
        """An event about the pod; it may tell why an end came, or what a pod waits for."""
        entry = self._entries.get(worker_id)
        if entry is None or (
            entry.pod and event["involvedObject"].get("uid") not in (None, entry.pod["metadata"].get("uid"))
        ):
            return []
        entry.events = [*entry.events, event][-_EVENTS_KEPT:]
        if entry.pod is None:
            return []
        return self._close(worker_id, entry, self._judge_end(entry)) if entry.held else self.seen(entry.pod)

    def finds_no_place(self, pod: Object) -> None:
        """A reference to a pod, anybody's: it may be given the place of a worker."""
        self._waiting.pop(pod.get("uid", ""), None)
        self._waiting[pod.get("uid", "")] = pod
        if len(self._waiting) > _WAITING_KEPT:
            del self._waiting[next(iter(self._waiting))]

    # ---- ends whose cause may still come ----

    def held(self, worker_id: int) -> bool:
        """Whether a worker's end is held back until it is clear who brought it about."""
        return worker_id in self._entries and self._entries[worker_id].held

    def settle(self, worker_id: int) -> Reports:
        """Nothing more is expected: report the end as it looks."""
        entry = self._entries.get(worker_id)
        return self._end(worker_id, self._judge_end(entry)) if entry and entry.held else []

    def _close(self, worker_id: int, entry: Entry, verdict: Ended) -> Reports:
        entry.held = verdict.open
        return [] if entry.held else self._end(worker_id, verdict)

    def _end(self, worker_id: int, verdict: Ended) -> Reports:
        entry = self._entries.pop(worker_id)
        self._ended.add(worker_id)
        if entry.pod and not entry.gone:
            self._left.append(worker_id)
        node = str((entry.pod or {}).get("spec", {}).get("nodeName") or "")
        return [WorkerExited(worker_id, verdict.cause, verdict.code, verdict.detail, verdict.output, node)]

    def _wait(self, worker_id: int, entry: Entry, waiting: Waiting) -> Reports:
        if entry.placed or waiting == entry.waits:
            return []
        if entry.waits is None and waiting.on_its_way:  # reported only to replace an older reason
            return []
        # The reason why an image can't be pulled is given once; then it is only said that it is tried again.
        if entry.waits and entry.waits.image and waiting.image and not waiting.lasting:
            return []
        entry.waits = waiting
        return [WorkerPending(worker_id, waiting.reason, waiting.node)]

    def _judge_end(self, entry: Entry) -> Ended:
        assert entry.pod is not None
        return judge_end(entry.pod, self._named(entry.events), told=entry.told, gone=entry.gone)

    def _named(self, events: list[Object]) -> list[Object]:
        """With a reference to the preemptor where an event has only its number."""
        numbers = [_PREEMPTOR.match(str(event.get("message"))) for event in events]
        others = [self._waiting.get(number[1]) if number else None for number in numbers]
        return [{"related": other, **event} if other else event for event, other in zip(events, others, strict=True)]


def found(pod: Object) -> FoundWorker:
    """What a master that takes over is told of it."""
    verdict = judge(pod, (), told=False)
    host, pid = (verdict.host, PID) if isinstance(verdict, Running) else ("", 0)
    node = "" if isinstance(verdict, Ended) else verdict.node
    return FoundWorker(worker_id_of(pod), host, pid, isinstance(verdict, Ended), is_doubtful(pod), node)
