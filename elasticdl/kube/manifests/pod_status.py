"""What the statuses of Jobs and pods say, in words for people: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.common.reason import flat

Object = Mapping[str, Any]
_SIGNALLED = 128  # and the number of the signal
# After which a kubelet goes on trying: the registry may be back soon, or the image be pushed.
_MAY_PASS = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable")
_WILL_NOT = ("InvalidImageName", "ErrImageNeverPull")
_AS_ROOT = ("runAsNonRoot", "non-root policy")
_REMEDY = "end the image's Dockerfile with `USER 1000`, or give such a spec.securityContext.runAsUser in --pod_template"


@dataclass(frozen=True, slots=True)
class ImageTrouble:
    """``lasting``: it takes a change by a person."""

    reason: str
    lasting: bool


def image_trouble(waiting: Object) -> ImageTrouble | None:
    """What the ``waiting`` state of a container says of its image; None if that is not what it waits for."""
    kind, message = str(waiting.get("reason") or ""), flat(waiting.get("message") or "")
    if kind in _MAY_PASS or kind in _WILL_NOT:
        return ImageTrouble(f"the image can't be pulled: {message or kind}", kind in _WILL_NOT)
    if any(words in message for words in _AS_ROOT):  # also for a user whose number the node does not know
        said, _, _ = message.partition(" (pod: ")
        return ImageTrouble(f"nothing may run as root here: {said}; {_REMEDY}", lasting=True)
    return None


@dataclass(frozen=True, slots=True)
class MasterTrouble:
    """``image``: what is wrong with its image, if that is why."""

    reason: str
    image: ImageTrouble | None = None


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
