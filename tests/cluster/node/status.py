"""What a pod's status says, from what is known of its containers; as a kubelet derives it, without effects."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.cluster.node.api import Json


@dataclass(slots=True)
class ContainerView:
    """What the API shows of one container."""

    name: str
    image: str
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Json = field(default_factory=dict)
    restarts: int = 0

    @property
    def running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """Of the run that has ended and not been followed by another."""
        ended = self.state.get("terminated")
        return None if ended is None else ended["exitCode"]

    @property
    def has_run(self) -> bool:
        return not {"running", "terminated"}.isdisjoint(self.state) or bool(self.last_state)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a pod has failed as a whole, whatever its containers did."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodView:
    """What the API shows of a pod besides its containers."""

    uid: str
    host_address: str
    address: str
    started: str
    restart_policy: str
    ending: bool = False
    verdict: Verdict | None = None


def restarts(policy: str, exit_code: int) -> bool:
    """Whether a container that ended with ``exit_code`` is started again."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def phase(pod: PodView, containers: list[ContainerView]) -> str:
    """Pending until every container has run; then Running until all have ended for good."""
    if pod.verdict:
        return "Failed"
    codes = [each.exit_code for each in containers]
    ended = [code for code in codes if code is not None]
    if pod.ending and not any(each.running for each in containers):
        return "Succeeded" if len(ended) == len(codes) and not any(ended) else "Failed"
    if not all(each.has_run for each in containers):
        return "Pending"
    if len(ended) < len(codes) or any(restarts(pod.restart_policy, code) for code in ended):
        return "Running"
    return "Failed" if any(ended) else "Succeeded"


def pod_status(pod: PodView, containers: list[ContainerView], now: str) -> Json:
    """The body of a patch of the pod's status."""
    ready = bool(containers) and all(each.running for each in containers) and not pod.verdict
    told = phase(pod, containers)
    unready = "PodCompleted" if told == "Succeeded" else "ContainersNotReady"
    conditions: list[Json] = [{"type": "Initialized", "status": "True", "lastTransitionTime": now}]
    for name in ("Ready", "ContainersReady"):
        reason = None if ready else unready
        conditions.append({"type": name, "status": str(ready), "lastTransitionTime": now, "reason": reason})
    return {
        "phase": told,
        "reason": pod.verdict.reason if pod.verdict else None,
        "message": pod.verdict.message if pod.verdict else None,
        "startTime": pod.started,
        "hostIP": pod.host_address,
        "podIP": pod.address,
        "podIPs": [{"$patch": "replace"}, {"ip": pod.address}],  # an earlier node may have told another one
        "conditions": conditions,
        "containerStatuses": [_container_status(pod, each) for each in containers],
    }


def _container_status(pod: PodView, container: ContainerView) -> Json:
    return {
        "name": container.name,
        "image": container.image,
        "imageID": f"process://{container.image}" if container.has_run else "",
        "containerID": f"process://{pod.uid}/{container.name}/{container.restarts}" if container.has_run else "",
        "restartCount": container.restarts,
        "started": container.running,
        "ready": container.running,
        "state": container.state,
        "lastState": container.last_state,
    }
