"""What is known of each pod, and what of it is news: every method returns the reports that follow.

Whatever comes twice, late or out of order changes nothing: reports are made from what a pod is, and its loss is
reported once. Owned by the event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticdl.kube.manifests import is_deleted
from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.judge import Ended, Waiting, doubt, judge, judge_end, log_of
from elasticdl.places.worker_pods import index_of, number_of

Object = Mapping[str, Any]
Reports = list[PlaceChanged | PlaceLost]


@dataclass(slots=True)
class Entry:
    """One pod that is not known to be gone."""

    number: int
    index: int
    place: Place  # as last reported
    pod: Object | None = None  # as last seen
    told: bool = False  # by us, to end
    waits: Waiting | None = None  # as last reported
    warning: str = ""  # why it can't be started, as its node said last

    @property
    def leaves(self) -> bool:
        """Whether it is being deleted, or is about to be."""
        return self.told or bool(self.pod and is_deleted(self.pod))


class Ledger:
    def __init__(self, name: Callable[[int], str], first_number: int = 0) -> None:
        """``name``: that of a pod by its number, which is its place's id. ``first_number``: that no pod has had before."""
        self._name = name
        self._entries: dict[int, Entry] = {}
        self._ended: set[int] = set()
        self._highest = first_number - 1  # of all numbers
        self.ever_placed = False
        self.left: list[int] = []  # whose end is reported, and whose pods are still there, the oldest first

    def __len__(self) -> int:
        """As many are not known to be gone."""
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        """Whether a pod was asked for or adopted and is not known to be gone."""
        return number in self._entries

    @property
    def numbers(self) -> list[int]:
        return sorted(self._entries)

    @property
    def image_trouble(self) -> Waiting | None:
        """Why no pod has ever run, if it is because of the image."""
        if self.ever_placed:  # asked after every change of a pod, of which there may be thousands
            return None
        waits = [entry.waits for entry in self._entries.values() if entry.waits and entry.waits.image]
        return max(waits, key=lambda wait: wait.lasting, default=None)

    def known(self, number: int) -> bool:
        return number in self._entries or number in self._ended

    def wanted(self, state: PlaceState) -> list[int]:
        """Those in this state of which somebody may still want something."""
        return [number for number, each in self._entries.items() if each.place.state is state and not each.told]

    def runs(self) -> bool:
        """Whether there is any that may end by itself."""
        states = (PlaceState.READY, PlaceState.ENDING)
        return any(entry.place.state in states for entry in self._entries.values())

    def ask(self, count: int) -> list[Entry]:
        """Begin so many entries. Each index is the first that is free, or whose pod is about to leave it."""
        taken = {entry.index for entry in self._entries.values() if not entry.leaves}
        free = itertools.islice((index for index in itertools.count() if index not in taken), count)
        begun = [
            Entry(number, index, Place(self._name(number))) for number, index in enumerate(free, self._highest + 1)
        ]
        self._entries |= {entry.number: entry for entry in begun}
        self._highest += count
        return begun

    def adopt(self, pod: Object) -> Place:
        """Begin an entry for a pod that was asked for by somebody else, a master before this one."""
        number = number_of(pod)
        entry = self._entries[number] = Entry(number, index_of(pod), Place(self._name(number)))
        self._highest = max(self._highest, number)
        if isinstance(judge(pod, told=False), Ended):  # which is reported when it is seen again
            entry.place = replace(entry.place, state=PlaceState.LOST, node=str(pod["spec"].get("nodeName") or ""))
        else:
            self.seen(pod)
        entry.pod, entry.told = pod, is_deleted(pod)
        return entry.place

    def tell(self, number: int) -> bool:
        """Note that we have it ended; whether there is anything to end."""
        if entry := self._entries.get(number):
            entry.told = True
        return entry is not None

    # ---- what was seen ----

    def refused(self, number: int, reason: str) -> Reports:
        """The cluster does not take the pod, now; it is tried again."""
        entry = self._entries.get(number)
        return self._wait(entry, Waiting(reason)) if entry else []

    def never(self, number: int, cause: ExitCause, detail: str) -> Reports:
        """There is no pod and will be none."""
        code = 1 if cause is ExitCause.CRASHED else -9
        entry = self._entries.get(number)
        return self._end(entry, Ended(cause, code, detail)) if entry else []

    def seen(self, pod: Object) -> Reports:
        number = number_of(pod)
        entry = self._entries.get(number)
        if entry is None:
            return []
        entry.pod = pod
        verdict = judge(pod, told=entry.told, warning=entry.warning)
        if isinstance(verdict, Ended):
            self.left.append(number)
            return self._end(entry, verdict)
        why = doubt(pod)
        if verdict is None:
            entry.waits, self.ever_placed = None, True
            state, node = PlaceState.ENDING if why else PlaceState.READY, str(pod["spec"].get("nodeName") or "")
            return self._change(entry, replace(entry.place, node=node, state=state, reason=why, log=log_of(pod)))
        if why:  # what it still waits for does not matter
            return (
                []
                if entry.told
                else self._change(entry, replace(entry.place, state=PlaceState.ENDING, reason=why, node=verdict.node))
            )
        return self._wait(entry, verdict)

    def gone(self, number: int, pod: Object | None = None) -> Reports:
        """The pod's object is not there any more; ``pod`` is the last of it."""
        entry = self._entries.get(number)
        if entry is None:
            return []
        entry.pod = pod or entry.pod
        if entry.pod is None:
            cause = ExitCause.KILLED if entry.told else ExitCause.DELETED
            return self._end(entry, Ended(cause, -9, "its pod is not there any more"))
        return self._end(entry, judge_end(entry.pod, told=entry.told, gone=True))

    def created(self, pod: Object) -> Reports:
        """The answer to our request for it, which what was seen since may have overtaken."""
        entry = self._entries.get(number_of(pod))
        return self.seen(entry.pod or pod) if entry else []

    def missing(self, pods: Iterable[Object]) -> list[int]:
        """Those that were seen and are not among these; they may have come after the list was made."""
        there = {number_of(pod) for pod in pods}
        return [number for number, each in self._entries.items() if each.pod and number not in there]

    def starting(self) -> dict[int, str]:
        """The pods that have a node, do not run yet, and say nothing of why: their uids by number."""
        found = {}
        for number in self.wanted(PlaceState.WAITING):
            pod = self._entries[number].pod
            verdict = judge(pod, told=False) if pod else None
            if pod and isinstance(verdict, Waiting) and verdict.node and verdict.on_its_way:
                found[number] = str(pod["metadata"].get("uid"))
        return found

    def warned(self, number: int, warning: str) -> Reports:
        """Its node says why the pod can't be started."""
        entry = self._entries.get(number)
        if entry is None or entry.pod is None:
            return []
        entry.warning = warning
        return self.seen(entry.pod)

    def _end(self, entry: Entry, verdict: Ended) -> Reports:
        del self._entries[entry.number]
        self._ended.add(entry.number)
        node = str((entry.pod or {}).get("spec", {}).get("nodeName") or "")
        # Of one that never ran nobody may know yet which node has refused it.
        told = [] if entry.place.node == node else self._change(entry, replace(entry.place, node=node))
        return [*told, PlaceLost(entry.place.id, verdict.cause, verdict.code, verdict.detail, verdict.output)]

    def _change(self, entry: Entry, place: Place) -> Reports:
        if place == entry.place or entry.place.state is PlaceState.LOST:
            return []
        entry.place = place
        return [PlaceChanged(place)]

    def _wait(self, entry: Entry, waiting: Waiting) -> Reports:
        if entry.place.state is not PlaceState.WAITING or waiting == entry.waits:
            return []
        if entry.waits is None and waiting.on_its_way:  # reported only to replace an older reason
            return []
        # The reason why an image can't be pulled is given once; then it is only said that it is tried again.
        if entry.waits and entry.waits.image and waiting.image and not waiting.lasting:
            return []
        entry.waits = waiting
        return self._change(entry, replace(entry.place, reason=waiting.reason, node=waiting.node))
