"""Whether a job's masters crash again and again, from the pods that they have left: pure.

A Job starts another master whatever became of the last one, as it may have been lost with its node. Clusters before 1.26
can't tell the two apart in the Job itself, so a master that starts looks at its predecessors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from elasticdl.kubernetes.manifests.names import CONTAINER
from elasticdl.master.core.events import ExitCause
from elasticdl.master.launchers.kubernetes.judge import judge_end

Object = Mapping[str, Any]
MOST_CRASHES = 5
# A master that ran for longer than this was able to work; the next one starts the count anew.
SOON_SECONDS = 600.0


def crash_loop(pods: Iterable[Object], job_uid: str) -> str:
    """Why no other master should be started; empty if one should. ``pods``: those of masters, also of other jobs."""
    ended = sorted((pod for pod in pods if _is_of(pod, job_uid) and _end(pod)), key=_finished, reverse=True)
    crashes = list(itertools.takewhile(_crashed_soon, ended))
    if len(crashes) < MOST_CRASHES:
        return ""
    verdict = judge_end(crashes[0], (), told=False, gone=False)
    said = verdict.output.strip().splitlines()[-1:]
    return f"its master crashed {len(crashes)} times in a row: {', '.join([*said, verdict.detail])}"


def _crashed_soon(pod: Object) -> bool:
    cause = judge_end(pod, (), told=False, gone=False).cause
    seconds = (_finished(pod) - datetime.fromisoformat(_end(pod)["startedAt"])).total_seconds()
    return cause in (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY) and seconds < SOON_SECONDS


def _is_of(pod: Object, job_uid: str) -> bool:
    return any(owner["uid"] == job_uid for owner in pod["metadata"].get("ownerReferences") or ())


def _end(pod: Object) -> Object:
    """How its container ended; empty if it has not, or nobody saw it."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    states = (each.get("state") or {} for each in statuses if each.get("name") == CONTAINER)
    end = next((state.get("terminated") or {} for state in states), {})
    return end if end.get("startedAt") and end.get("finishedAt") else {}


def _finished(pod: Object) -> datetime:
    return datetime.fromisoformat(_end(pod)["finishedAt"])
