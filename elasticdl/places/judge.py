"""What a pod says of itself, a worker's or the master's: whether it waits, runs or has ended, and why.

The condition `DisruptionTarget` says who ended a pod. Where it is missing, the pod's reason and what its node last told do.
No event is asked for a cause: events come late, or not at all. The first line that fits decides:

| what is seen | the cause |
| --- | --- |
| the container was `OOMKilled` | out of memory |
| `TerminationTarget`, by Kueue | as its reason says, with Kueue's own text, which has its preemptor's number |
| `DisruptionTarget` | as its reason says |
| the pod's own `reason`: Preempting; NodeLost; a refusal that every node repeats | preempted; node lost; crashed |
| another, of a node that evicts it, shuts down or refuses it | evicted |
| it was deleted, not ready, and the node never told of its end | node lost |
| it was deleted by us; by somebody else | killed; deleted |
| anything else | as its exit code says |

A Job starts another master whatever became of the last one, as it may have been lost with its node. One that starts looks
at its predecessors, and ends a job whose masters crash again and again (`crash_loop`). The Job's controller waits longer
after each pod that failed, and counts those that were lost, too. It counts no pod without its finalizer (`TRACKING`). So a
master takes the finalizer off its own pod, unless the one before it crashed, and puts it back when the job is over.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elasticdl.common.reason import flat
from elasticdl.kube.manifests import is_deleted, is_over
from elasticdl.kube.names import CONTAINER, owner_uids
from elasticdl.master.core.events import ExitCause
from elasticdl.places.worker_process import judge_exit

Object = Mapping[str, Any]

MOST_CRASHES = 5
# A master that ran for longer than this was able to work; the next one starts the count anew.
SOON_SECONDS = 600.0
TRACKING = "batch.kubernetes.io/job-tracking"
_NO_CODE = -int(signal.SIGKILL)  # for one of which nobody saw the end
_DISRUPTIONS = {
    "PreemptionByScheduler": ExitCause.PREEMPTED,
    "EvictionByEvictionAPI": ExitCause.EVICTED,
    "TerminationByKubelet": ExitCause.EVICTED,
    "DeletionByPodGC": ExitCause.NODE_LOST,
}
_TAINT = "DeletionByTaintManager"
# Preempting: in favour of a pod that the node itself can't do without.
# The others: what the template asks of it no node will do, and only a person can mend that.
_REFUSALS = ("SysctlForbidden", "PodOSNotSupported", "PodOSSelectorNodeLabelDoesNotMatch")
_REASONS = {
    "Preempting": ExitCause.PREEMPTED,
    "NodeLost": ExitCause.NODE_LOST,
    **dict.fromkeys(_REFUSALS, ExitCause.CRASHED),
}
# Kueue sets it before it deletes a pod. Its other reasons are evictions: a queue that is stopped, pods that are not ready in time,
# a workload that is gone.
_KUEUE = "TerminationTarget"
_KUEUE_PREEMPTS = ("WorkloadEvictedDueToPreempted", "Preempted")
# So begin the reasons of a pod that waits for nothing in particular.
ON_ITS_WAY = ("the scheduler has not looked at it yet", "it is being started on ")
_IN_QUEUE = "it waits in its queue"
# So Volcano describes the group. The counts change with each of its pods, which is no news of the others.
_VOLCANO_WAITS = re.compile(r"pod group is (?:not )?ready, .*?(?:\. Origin reason is[^:]*: (?P<why>.*))?$")
_DEFAULT_SCHEDULER = "default-scheduler"
_QUIET = ("ContainerCreating", "PodInitializing")
# After which a kubelet goes on trying: the registry may be back soon, or the image be pushed.
_MAY_PASS = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable")
_WILL_NOT = ("InvalidImageName", "ErrImageNeverPull")
_AS_ROOT = ("runAsNonRoot", "non-root policy")
_REMEDY = "end the image's Dockerfile with `USER 1000`, or give such a spec.securityContext.runAsUser in --pod_template"
MASTER_STARTS = "its master is starting"
NO_MASTER = "its master's pod is not there yet"


@dataclass(frozen=True, slots=True)
class Waiting:
    """It does not run yet. ``image``: for one that can't be pulled, or started; ``lasting``: until a person mends it.
    ``node``: on which it has its place; empty if it waits for one."""

    reason: str
    image: bool = False
    lasting: bool = False
    node: str = ""

    @property
    def on_its_way(self) -> bool:
        """It waits for nothing in particular."""
        return self.reason.startswith(ON_ITS_WAY)


@dataclass(frozen=True, slots=True)
class Ended:
    cause: ExitCause
    code: int
    detail: str
    output: str = ""


def judge_pod(pod: Object, *, told: bool, warning: str = "") -> Waiting | Ended | None:
    """What a pod that is there says; None if it runs. ``told``: it is us who had it ended. ``warning``: why it can't be started, as
    its node says."""
    main = _main_status(pod)
    # With further containers in it a pod is not over before those are, which may be never.
    alone = len(pod["spec"].get("containers") or ()) < 2
    if is_over(pod) or ("terminated" in main and not alone):
        return judge_end(pod, told=told, gone=False)
    return None if "running" in main else _judge_wait(pod, warning)


def doubt(pod: Object) -> str:
    """Why nobody should be started in it, though it runs; empty if there is no reason."""
    if is_deleted(pod):
        return "its pod is being deleted"
    return f"{_node(pod)} does not answer" if _silent(pod) else ""


def log_of(pod: Object) -> str:
    """The command that shows it."""
    metadata = pod["metadata"]
    return f"kubectl logs -n {metadata.get('namespace', 'default')} {metadata['name']}"


def judge_end(pod: Object, *, told: bool, gone: bool) -> Ended:
    """Why a pod is over. ``gone``: its object is not there any more, and this is the last that was seen of it."""
    end = _main_status(pod).get("terminated")
    code = _NO_CODE if end is None else int(end.get("exitCode", 1))
    output = str((end or {}).get("message") or "") if code > 0 else ""
    if (end or {}).get("reason") == "OOMKilled":
        return Ended(ExitCause.OUT_OF_MEMORY, code, _memory(pod), output)
    if found := _disruption(pod, end is None):
        return Ended(found[0], code, found[1])
    if gone or is_deleted(pod):
        if end is None and _silent(pod):
            return Ended(ExitCause.NODE_LOST, code, f"{_node(pod)} does not answer")
        if told:
            return Ended(ExitCause.KILLED, code, "as told" if _scheduled(pod) else "it had no place yet")
        return Ended(ExitCause.DELETED, code, f"somebody deleted pod {pod['metadata']['name']}")
    if end is None:
        return Ended(ExitCause.CRASHED, 1, flat(_status(pod).get("message") or "its pod has failed"))
    return _by_code(pod, end, code, output)


def why_no_master(pod: Object | None, warning: str = "") -> Waiting:
    """Of a master that does not run; ``pod`` is None if there is none. ``warning``: as of `judge_pod`."""
    if pod is None:
        return Waiting(NO_MASTER)
    if is_deleted(pod):
        return Waiting("its master is leaving its place, and will be started anew")
    match judge_pod(pod, told=False, warning=warning):
        case Ended() as end:
            return Waiting(f"its master ended: {_last_words(end)}")
        case Waiting() as waiting if not waiting.on_its_way:
            why = "waits" if waiting.node else "has no place yet"
            return waiting if waiting.image else replace(waiting, reason=f"its master {why}: {waiting.reason}")
    return Waiting(MASTER_STARTS)


def _last_words(end: Ended) -> str:
    """How it ended, after the last line that it printed; who was killed has not said why in it."""
    said = end.output.strip().splitlines()[-1:] if end.cause is ExitCause.CRASHED else []
    return ", ".join([*(each for each in said if each not in end.detail), end.detail])


def last_crashes(pods: Iterable[Object], job_uid: str) -> list[Ended]:
    """How the masters of this job ended that crashed in a row, the last first. ``pods``: those of masters, also of other jobs."""
    seen = [(end, pod) for pod in pods if job_uid in owner_uids(pod) and (end := _main_status(pod).get("terminated"))]
    crashes: list[Ended] = []
    # Those whose end nobody saw have no times.
    ended = [(end, pod) for end, pod in seen if end.get("startedAt") and end.get("finishedAt")]
    for end, pod in sorted(ended, key=lambda each: str(each[0]["finishedAt"]), reverse=True):
        ran = datetime.fromisoformat(end["finishedAt"]) - datetime.fromisoformat(end["startedAt"])
        verdict = judge_end(pod, told=False, gone=False)
        if verdict.cause not in (ExitCause.CRASHED, ExitCause.OUT_OF_MEMORY) or ran.total_seconds() >= SOON_SECONDS:
            break
        crashes.append(verdict)
    return crashes


def crash_loop(crashes: Sequence[Ended]) -> str:
    """Why no other master should be started after these; empty if one should."""
    if len(crashes) < MOST_CRASHES:
        return ""
    return f"its master crashed {len(crashes)} times in a row: {_last_words(crashes[0])}"


def _silent(pod: Object) -> bool:
    """It runs, for all that is known, and is not ready: nobody can reach its node to ask."""
    return _condition(pod, "Ready").get("status") == "False" and "running" in _main_status(pod)


def _disruption(pod: Object, unseen: bool) -> tuple[ExitCause, str] | None:
    """Who took the pod's place away; ``unseen``: no node has told of its end."""
    kueue, condition = _condition(pod, _KUEUE), _condition(pod, "DisruptionTarget")
    reason, text = str(kueue.get("reason")), flat(kueue.get("message") or "")
    if kueue.get("status") == "True":
        return ExitCause.PREEMPTED if reason in _KUEUE_PREEMPTS else ExitCause.EVICTED, f"Kueue: {text or reason}"
    if condition.get("status") == "True":
        reason = str(condition.get("reason"))
        cause = ExitCause.NODE_LOST if reason == _TAINT and unseen else _DISRUPTIONS.get(reason, ExitCause.EVICTED)
        return cause, flat(condition.get("message") or reason)
    if reason := str(_status(pod).get("reason") or ""):
        return _REASONS.get(reason, ExitCause.EVICTED), flat(_status(pod).get("message") or reason)
    return None


def _by_code(pod: Object, end: Object, code: int, output: str) -> Ended:
    cause, detail = judge_exit(code, output)
    if cause is ExitCause.CRASHED:
        if end.get("reason") in ("ContainerCannotRun", "StartError"):
            return Ended(cause, code, f"can't start it: {flat(output)}")
        detail += f"; its log: {log_of(pod)}"
    return Ended(cause, code, detail, output)


def _judge_wait(pod: Object, warning: str) -> Waiting:
    scheduled = _condition(pod, "PodScheduled")
    if not _scheduled(pod):
        return Waiting(_unplaced(pod, scheduled))
    status, node = _status(pod), str(pod["spec"]["nodeName"])
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason", "")), flat(waiting.get("message") or "")
        if reason in _MAY_PASS or reason in _WILL_NOT:
            why = f"the image can't be pulled: {message or reason}"
            return Waiting(why, image=True, lasting=reason in _WILL_NOT, node=node)
        if any(words in message for words in _AS_ROOT):  # also for a user whose number the node does not know
            said, _, _ = message.partition(" (pod: ")
            why = f"nothing may run as root here: {said}; {_REMEDY}"
            return Waiting(why, image=True, lasting=True, node=node)
        if reason and reason not in _QUIET:
            return Waiting(f"its container can't be started on {_node(pod)}: {message or reason}", node=node)
    if warning:
        return Waiting(f"it can't be started on {_node(pod)}: {warning}", node=node)
    return Waiting(ON_ITS_WAY[1] + _node(pod), node=node)


def _unplaced(pod: Object, scheduled: Object) -> str:
    """Why it has no node yet."""
    message = flat(scheduled.get("message") or "")
    if scheduled.get("reason") == "SchedulingGated":
        return _IN_QUEUE
    if of_group := _VOLCANO_WAITS.match(message):
        return f"{_IN_QUEUE}: {of_group['why']}" if of_group["why"] else _IN_QUEUE
    if message:
        return message
    scheduler = pod["spec"].get("schedulerName") or _DEFAULT_SCHEDULER
    # Volcano never looks at a pod of a queue that is not there, and says nothing.
    return ON_ITS_WAY[0] if scheduler == _DEFAULT_SCHEDULER else f"the scheduler {scheduler} has not looked at it yet"


def _main_status(pod: Object) -> Object:
    """The state of the container that is the worker; empty if nothing is known of it."""
    for container in _status(pod).get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            state = container.get("state") or {}
            return {key: value for key, value in state.items() if value is not None}
    return {}


def _condition(pod: Object, kind: str) -> Object:
    return next((each for each in _status(pod).get("conditions") or () if each.get("type") == kind), {})


def _status(pod: Object) -> Object:
    status: Object = pod.get("status") or {}
    return status


def _scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def _node(pod: Object) -> str:
    return f"node {pod['spec'].get('nodeName', '?')}"


def _memory(pod: Object) -> str:
    for container in pod["spec"].get("containers") or ():
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if container.get("name") == CONTAINER and limit:
            return f"it took more memory than its limit of {limit}"
    return "its node was out of memory"
