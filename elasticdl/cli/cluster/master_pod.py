"""Why a job's master does not run, or is not heard of, from its pod and its Job: pure. Times are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.common.reason import flat
from elasticdl.kubernetes.manifests.image_trouble import ImageTrouble, image_trouble

Object = Mapping[str, Any]
_SIGNALLED = 128  # and the number of the signal
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen


@dataclass(frozen=True, slots=True)
class MasterTrouble:
    """``image``: what is wrong with its image, if that is why."""

    reason: str
    image: ImageTrouble | None = None


class ImagePatience:
    """How long it is waited for an image, in seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since: float | None = None

    def is_over(self, trouble: MasterTrouble, now: float) -> bool:
        """To be asked at every look: whether the image has been missing for too long, or will not come at all."""
        if trouble.image is None:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return trouble.image.lasting or now - self._since >= self._timeout


class Contact:
    """Whether a master that runs is reached, and when that is to be told."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def lost(self, now: float) -> bool:
        """To be asked while it does not answer: whether to say so now."""
        self._since = now if self._since is None else self._since
        due = not self._told and now - self._since >= UNREACHED_SECONDS
        self._told = self._told or due
        return due

    def restored(self) -> bool:
        """To be asked when it answers: whether to say so."""
        told, self._told, self._since = self._told, False, None
        return told


def finished(job: Object) -> str:
    """How a Job has ended: "Complete", "Failed", or empty if it has not."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next(
        (str(each["type"]) for each in conditions if _holds(each) and each["type"] in ("Complete", "Failed")), ""
    )


def trouble_of(pod: Object | None) -> MasterTrouble:
    """Of a master that does not run; ``pod`` is None if there is none."""
    if pod is None:
        return MasterTrouble("its master's pod is not there yet")
    status = pod.get("status", {})
    states = [each.get("state", {}) for each in status.get("containerStatuses") or ()]
    if pod["metadata"].get("deletionTimestamp"):
        return MasterTrouble("its master is leaving its place, and will be started anew")
    for state in states:
        if ended := state.get("terminated"):
            # What was killed has not said why in its last line.
            said = "" if ended["exitCode"] > _SIGNALLED else str(ended.get("message") or "").strip()
            detail = f": {said.splitlines()[-1]}" if said else ""
            return MasterTrouble(f"its master ended with exit code {ended['exitCode']}{detail}")
        waiting = state.get("waiting") or {}
        if trouble := image_trouble(waiting):
            return MasterTrouble(trouble.reason, trouble)
        if waiting.get("message"):
            return MasterTrouble(f"its master waits: {flat(waiting['message'])}")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and not _holds(condition):
            return MasterTrouble(f"its master has no place yet: {condition.get('message') or condition.get('reason')}")
    if status.get("phase") in ("Failed", "Succeeded"):
        return MasterTrouble(f"its master ended: {status.get('message') or status.get('reason') or status['phase']}")
    return MasterTrouble("its master is starting")


def _holds(condition: Object) -> bool:
    return bool(condition["status"] == "True")
