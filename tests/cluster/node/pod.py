"""One pod of a node: a thread that keeps its containers as the manifest wants them, and reports.

What happens (the manifest changes, a process ends, the object vanishes) arrives in one queue. After each message the
whole situation is looked at anew, so a lost or repeated message does no harm.
"""

from __future__ import annotations

import math
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elasticdl.kube.client import ApiError
from tests.cluster.node import MISSING_IMAGES
from tests.cluster.node.api import Api, Json
from tests.cluster.node.container import NEVER, Container
from tests.cluster.node.environment import CannotStart, Invocation, invocation
from tests.cluster.node.services import Services
from tests.cluster.node.status import PodRef, Reporter, Verdict, phase, pod_status, timestamp
from tests.cluster.node.volumes import Sources, Unready, link_mounts, make_volume
from tests.cluster.processes import Leashed

GPU = "nvidia.com/gpu"
_TRY_AGAIN_S = 1.0
# A node may be told of its pod a moment before it may read what the pod needs.
_LOOK_AGAIN_S = 0.2
_DEVICES_WITHIN_S = 5.0
_LOST_EXIT_CODE = 255


class Devices:
    """The GPUs of a node by number: which pod has which; safe for many threads."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int] | None:
        """The lowest that are free; None if fewer than ``count`` stay free."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, _DEVICES_WITHIN_S):
                return None
            taken = sorted(self._free)[:count]
            self._free.difference_update(taken)
            return taken

    def give_back(self, ids: list[int]) -> None:
        with self._changed:
            self._free.update(ids)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Host:
    """What a node gives to its pods."""

    address: str
    pods: Path
    logs: Path
    api: Api
    reporter: Reporter
    devices: Devices
    environment: Mapping[str, str]
    new_address: Callable[[], str]
    services: Services


class Pod:
    """Runs from ``start`` until its object has vanished and all its processes have ended."""

    def __init__(self, manifest: Json, host: Host) -> None:
        self.ref = PodRef.of(manifest)
        self._manifest = manifest
        self._host = host
        self._spec: Json = manifest["spec"]
        # Called in the pod's own thread, one after the other.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        own = f"{self.ref.namespace}_{self.ref.name}_{self.ref.uid[:8]}"
        self._folder = host.pods / own
        logs = host.logs / own
        logs.mkdir(parents=True, exist_ok=True)
        self.containers = [Container(each, self._folder / each["name"], logs) for each in self._spec["containers"]]
        self.address = host.new_address()
        self._places = {
            "startTime": timestamp(),
            "hostIP": host.address,
            "podIP": self.address,
            "podIPs": [{"$patch": "replace"}, {"ip": self.address}],  # an earlier node may have told another one
        }
        self._devices: list[int] = []
        self._made: set[str] = set()
        self._verdict: Verdict | None = None
        self._vanished = False
        self._kill_at: float | None = None
        self._told: Json | None = None
        # Ended under a node of this name that is no more: what that one told stands.
        self._inherited = False

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"pod {self.ref.name}", daemon=True).start()

    def changed(self, manifest: Json) -> None:
        """The API server has a new version of the object."""
        self._inbox.put(lambda: setattr(self, "_manifest", manifest))

    def vanished(self) -> None:
        """The API server has it no more: whatever still runs is to be killed."""
        self._inbox.put(lambda: setattr(self, "_vanished", True))

    # Everything below runs in the pod's own thread.

    def _run(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._admit()
            while not (self._vanished and not self._processes()):
                self._advance(time.monotonic())
                self._receive()
        finally:
            for container in self.containers:
                container.kill()
            self._release_devices()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _admit(self) -> None:
        """Take up the pod, unless it cannot run here or its time here is past."""
        told = self._manifest.get("status", {}).get("phase")
        if told in ("Succeeded", "Failed"):
            self._verdict = Verdict("NodeLost", "the node was started again")
            self._inherited = True
        elif told == "Running":  # by a node of this name that is no more
            for container in self.containers:
                container.ended(_LOST_EXIT_CODE, reason="Unknown")
        limits = [each.get("resources", {}).get("limits") or {} for each in self._spec["containers"]]
        wanted = sum(int(each.get(GPU, 0)) for each in limits)
        if self._finished() or not wanted:
            return
        taken = self._host.devices.take(wanted)
        if taken is None:
            self._verdict = Verdict("UnexpectedAdmissionError", f"requested {wanted} of {GPU}, fewer are free")
        self._devices = taken or []

    def _receive(self) -> None:
        """Wait for a message, or for something to become due."""
        times = [each.due for each in self.containers if not self._ending()]
        if self._kill_at is not None and self._processes():
            times.append(self._kill_at)
        soonest = min(times, default=NEVER)
        try:
            self._inbox.get(timeout=None if soonest == NEVER else max(0.0, soonest - time.monotonic()))()
        except queue.Empty:
            return

    def _advance(self, now: float) -> None:
        if self._vanished or self._verdict:
            for container in self._processes():
                container.kill()
        elif self._deleted():
            self._end(now)
        else:
            for container in self.containers:
                if container.due <= now:
                    self._start(container, now)
        if self._finished():
            self._release_devices()
        self._report()

    def _end(self, now: float) -> None:
        """Ask the processes once, and make them when the time of grace is over."""
        grace = float(self._manifest["metadata"].get("deletionGracePeriodSeconds") or 0)
        if self._kill_at is None:
            self._kill_at = math.inf
            for container in self._processes():
                self._host.reporter.event(self.ref, "Killing", f"Stopping container {container.name}")
                container.signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at, now + grace)
        if now >= self._kill_at:
            for container in self._processes():
                container.kill()

    def _start(self, container: Container, now: float) -> None:
        if container.image.startswith(MISSING_IMAGES):
            pulled = container.state.get("waiting", {}).get("reason") != "ContainerCreating"
            reason = "ImagePullBackOff" if pulled else "ErrImagePull"
            what = "Back-off pulling image" if pulled else "failed to pull image"
            self._host.reporter.event(self.ref, "BackOff", f'{what} "{container.image}"', warning=True)
            container.wait(reason, f'{what} "{container.image}"', NEVER if pulled else now + _TRY_AGAIN_S)
            return
        try:
            process = container.run(self._prepare(container))
        except CannotStart as error:
            container.ended(128, reason="StartError", message=str(error))
        except Unready as error:
            container.wait("CreateContainerConfigError", str(error), now + _LOOK_AGAIN_S)
        except ApiError as error:
            container.wait("ContainerCreating", str(error), now + _TRY_AGAIN_S)
        else:
            threading.Thread(target=self._tell_end, args=(container, process), daemon=True).start()
            self._host.reporter.event(self.ref, "Started", f"Started container {container.name}")

    def _prepare(self, container: Container) -> Invocation:
        facts = {"status.podIP": self.address, "status.hostIP": self._host.address}
        sources = Sources(self._host.api, self._manifest, facts)
        volumes, root, temporary = self._folder / "volumes", container.folder / "root", container.folder / "tmp"
        volumes.mkdir(exist_ok=True)
        for volume in self._spec.get("volumes") or []:
            if volume["name"] not in self._made:
                make_volume(volume, volumes / volume["name"], sources)
                self._made.add(volume["name"])
        places = link_mounts(container.spec, volumes, root)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        given = {**self._host.environment, "HOSTNAME": self.ref.name, "HOME": str(root), "TMPDIR": str(temporary)}
        if self._devices:
            given["NVIDIA_VISIBLE_DEVICES"] = ",".join(map(str, self._devices))
        what = invocation(container.spec, sources, given, places, root)
        return replace(what, env={name: self._host.services.resolved(value) for name, value in what.env.items()})

    def _tell_end(self, container: Container, process: Leashed) -> None:
        code = process.wait()
        self._inbox.put(lambda: container.ended(code))

    def _report(self) -> None:
        """Tell the API server, if there is anything new to it."""
        if self._vanished:
            return
        if self._inherited:
            if self._deleted():
                self._host.reporter.report(self.ref, {}, final=True)
            return
        status = self._places | pod_status(self.ref.uid, self._phase(), self.containers, self._verdict)
        final = self._deleted() and not self._processes()
        if status != self._told or final:
            self._told = status
            self._host.reporter.report(self.ref, status, final=final)

    def _phase(self) -> str:
        return phase(self.containers, ending=self._ending(), verdict=self._verdict)

    def _finished(self) -> bool:
        """Nothing runs, and nothing will."""
        return not self._processes() and (self._ending() or self._phase() in ("Succeeded", "Failed"))

    def _processes(self) -> list[Container]:
        return [each for each in self.containers if each.process]

    def _deleted(self) -> bool:
        return "deletionTimestamp" in self._manifest["metadata"]

    def _ending(self) -> bool:
        return self._vanished or self._deleted() or self._verdict is not None

    def _release_devices(self) -> None:
        self._host.devices.give_back(self._devices)
        self._devices = []
