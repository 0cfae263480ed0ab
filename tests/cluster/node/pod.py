"""One pod of a node: a thread that keeps its container as the manifest wants it, and reports.

What happens (the manifest changes, the process ends, the object vanishes) arrives in one queue. After each message the
whole situation is looked at anew, so a lost or repeated message does no harm.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticdl.kube.client import ApiError
from tests.cluster.api import Api, Json
from tests.cluster.node.container import CannotStart, Sources, Unready, invocation, link_mounts, make_volume
from tests.cluster.node.services import Services
from tests.cluster.node.status import PodRef, Reporter, pod_status, timestamp
from tests.cluster.processes import Leashed

MISSING_IMAGES = "missing/"
NEVER = math.inf
_TRY_AGAIN_S = 1.0
# A node may be told of its pod a moment before it may read what the pod needs.
_LOOK_AGAIN_S = 0.2
_MESSAGE_TAIL = 2048
_CANNOT_START, _LOST = 128, 255  # exit codes


@dataclass(frozen=True, slots=True)
class HostOfPods:
    """What a node gives to its pods."""

    address: str
    pods: Path
    logs: Path
    api: Api
    reporter: Reporter
    environment: Mapping[str, str]
    new_address: Callable[[], str]
    services: Services


class Pod:
    """Runs from ``start`` until its object has vanished and its process has ended."""

    def __init__(self, manifest: Json, host: HostOfPods) -> None:
        self.ref = PodRef.of(manifest)
        self._manifest = manifest
        self._host = host
        self._spec: Json = manifest["spec"]
        self.container: Json = self._spec["containers"][0]
        # Called in the pod's own thread, one after the other.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        own = f"{self.ref.namespace}_{self.ref.name}_{self.ref.uid[:8]}"
        self._folder = host.pods / own
        self.log = host.logs / own / f"{self.container['name']}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process: Leashed | None = None
        self._state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self._due = 0.0  # when to start the process, on the monotonic clock
        self.address = host.new_address()
        self._places = {
            "startTime": timestamp(),
            "hostIP": host.address,
            "podIP": self.address,
            "podIPs": [{"$patch": "replace"}, {"ip": self.address}],  # an earlier node may have told another one
        }
        self._made: set[str] = set()
        self._vanished = False
        self._kill_at = NEVER
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
            while not (self._vanished and not self.process):
                self._advance(time.monotonic())
                self._receive()
        finally:
            if self.process:
                self.process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _admit(self) -> None:
        """Take up the pod, unless it cannot run here or its time here is past."""
        told = self._manifest.get("status", {}).get("phase")
        if told in ("Succeeded", "Failed"):
            self._inherited, self._due = True, NEVER
        elif told == "Running":  # by a node of this name that is no more
            self._end(_LOST, reason="Unknown")
        elif len(self._spec["containers"]) + len(self._spec.get("initContainers") or ()) > 1:
            self._end(_CANNOT_START, reason="StartError", message="a pod of this node has one container")

    def _receive(self) -> None:
        """Wait for a message, or for something to become due."""
        soonest = min(NEVER if self._ending() else self._due, self._kill_at if self.process else NEVER)
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=None if soonest == NEVER else max(0.0, soonest - time.monotonic()))()

    def _advance(self, now: float) -> None:
        if self._vanished:
            if self.process:
                self.process.kill()
        elif self._deleted():
            self._stop(now)
        elif self._due <= now:
            self._start(now)
        self._report()

    def _stop(self, now: float) -> None:
        """Ask the process once, and make it when the time of grace is over."""
        if not self.process:
            return
        if self._kill_at == NEVER:
            self.process.signal(signal.SIGTERM)
        # A second deletion may give it less time.
        grace = float(self._manifest["metadata"].get("deletionGracePeriodSeconds") or 0)
        self._kill_at = min(self._kill_at, now + grace)
        if now >= self._kill_at:
            self.process.kill()

    def _start(self, now: float) -> None:
        image = self.container["image"]
        if image.startswith(MISSING_IMAGES):
            self._wait("ImagePullBackOff", f'Back-off pulling image "{image}"', NEVER)
            return
        try:
            command, env, folder = self._prepare()
        except CannotStart as error:
            self._end(_CANNOT_START, reason="StartError", message=str(error))
        except Unready as error:
            self._wait("CreateContainerConfigError", str(error), now + _LOOK_AGAIN_S)
        except ApiError as error:
            self._wait("ContainerCreating", str(error), now + _TRY_AGAIN_S)
        else:
            self.process = Leashed.start(command, self.log, env, folder)
            self._state, self._due = {"running": {"startedAt": timestamp()}}, NEVER
            threading.Thread(target=self._tell_end, args=(self.process,), daemon=True).start()

    def _wait(self, reason: str, message: str, due: float) -> None:
        self._state, self._due = {"waiting": {"reason": reason, "message": message}}, due

    def _end(self, exit_code: int, *, reason: str = "", message: str = "") -> None:
        reason = reason or ("Error" if exit_code else "Completed")
        policy = self.container.get("terminationMessagePolicy")
        if not message and exit_code and policy == "FallbackToLogsOnError" and self.log.exists():
            message = self.log.read_bytes()[-_MESSAGE_TAIL:].decode(errors="replace")
        now = timestamp()
        over = {"exitCode": exit_code, "reason": reason, "message": message or None, "finishedAt": now}
        self.process, self._due = None, NEVER
        self._state = {"terminated": {"startedAt": now, **self._state.get("running", {}), **over}}

    def _prepare(self) -> tuple[list[str], dict[str, str], Path]:
        facts = {"status.podIP": self.address, "status.hostIP": self._host.address}
        sources = Sources(self._host.api, self._manifest, facts)
        volumes, root, temporary = (self._folder / each for each in ("volumes", "container/root", "container/tmp"))
        volumes.mkdir(exist_ok=True)
        for volume in self._spec.get("volumes") or []:
            if volume["name"] not in self._made:
                make_volume(volume, volumes / volume["name"], sources)
                self._made.add(volume["name"])
        places = link_mounts(self.container, volumes, root)
        temporary.mkdir(exist_ok=True)
        given = {**self._host.environment, "HOSTNAME": self.ref.name, "HOME": str(root), "TMPDIR": str(temporary)}
        command, env, folder = invocation(self.container, sources, given, places, root)
        return command, {name: self._host.services.resolved(value) for name, value in env.items()}, folder

    def _tell_end(self, process: Leashed) -> None:
        code = process.wait()
        self._inbox.put(lambda: self._end(code))

    def _report(self) -> None:
        """Tell the API server, if there is anything new to it."""
        final = self._deleted() and not self.process
        if self._vanished or (self._inherited and not final):
            return
        status = pod_status(self.ref.uid, self.container, self._state, ending=self._ending()) | self._places
        if status != self._told or final:
            self._told = status
            self._host.reporter.report(self.ref, {} if self._inherited else status, final=final)

    def _deleted(self) -> bool:
        return "deletionTimestamp" in self._manifest["metadata"]

    def _ending(self) -> bool:
        return self._vanished or self._deleted()
