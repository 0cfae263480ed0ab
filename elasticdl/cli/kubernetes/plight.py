"""Why a job's master does not run, from its pod and its Job: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
# After which a kubelet goes on trying, for images that may never be there.
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# What it says once it has tried at least twice, or will not try again.
_HOPELESS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_SIGNALLED = 128  # and the number of the signal


@dataclass(frozen=True, slots=True)
class Plight:
    """``hopeless``: it takes a change by a person."""

    reason: str
    hopeless: bool = False


def finished(job: Object) -> str:
    """How a Job has ended: "Complete", "Failed", or empty if it has not."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next(
        (str(each["type"]) for each in conditions if _holds(each) and each["type"] in ("Complete", "Failed")), ""
    )


def plight_of(pod: Object | None) -> Plight:
    """Of a master that does not run; ``pod`` is None if there is none."""
    if pod is None:
        return Plight("its master's pod is not there yet")
    status = pod.get("status", {})
    states = [each.get("state", {}) for each in status.get("containerStatuses") or ()]
    if pod["metadata"].get("deletionTimestamp"):
        return Plight("its master is leaving its place, and will be started anew")
    for state in states:
        if ended := state.get("terminated"):
            # What was killed has not said why in its last line.
            said = "" if ended["exitCode"] > _SIGNALLED else str(ended.get("message") or "").strip()
            detail = f": {said.splitlines()[-1]}" if said else ""
            return Plight(f"its master ended with exit code {ended['exitCode']}{detail}")
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in _NO_IMAGE:
            text = f"the image can't be pulled: {waiting.get('message') or waiting['reason']}"
            return Plight(" ".join(text.split()), hopeless=waiting["reason"] in _HOPELESS)
        if waiting.get("message"):
            return Plight(f"its master waits: {' '.join(str(waiting['message']).split())}")
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and not _holds(condition):
            return Plight(f"its master has no place yet: {condition.get('message') or condition.get('reason')}")
    if status.get("phase") in ("Failed", "Succeeded"):
        return Plight(f"its master ended: {status.get('message') or status.get('reason') or status['phase']}")
    return Plight("its master is starting")


def _holds(condition: Object) -> bool:
    return bool(condition["status"] == "True")
