"""Why the master of a job on a cluster is not heard of, told while somebody follows the job; and when that is given up."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticdl.cli.cluster.deletion import wait_until_gone
from elasticdl.cli.cluster.namespace_job import NamespaceJob
from elasticdl.cli.screens import Screen
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.kube.job_pods import find_master, is_running
from elasticdl.kube.manifests.names import master_name, without_name
from elasticdl.kube.manifests.pod_status import MasterTrouble, trouble_of
from elasticdl.proto import elasticdl_pb2 as pb

LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
QUIET_SECONDS = 5.0  # that a master is not looked at after it was heard of
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen
# A master that ends so often without ever having got to work will not do better.
STARTS = 3


class Stopwatch:
    """For how many seconds something has been so without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, holds: bool, now: float) -> float:
        """To be told at every look; 0 while it does not hold."""
        self._since = (now if self._since is None else self._since) if holds else None
        return 0.0 if self._since is None else now - self._since


@dataclass(slots=True)
class MasterWatch:
    handle: NamespaceJob
    screen: Screen
    image_timeout: float
    trouble: MasterTrouble = field(default_factory=lambda: MasterTrouble(""))  # as last shown
    without_image: Stopwatch = field(default_factory=Stopwatch)
    unreached: Stopwatch = field(default_factory=Stopwatch)
    unreached_told: bool = False
    look_at: float = 0.0

    def hear(self, heard: object, failure: str, now: float) -> None:
        """Of a job that is followed: what has come of it, if anything; and why nothing does at the moment, if its master fails to answer.

        Raises:
            UserError: its image can't be had; the job was deleted again.
            JobFailedError: its master does not get to work.
        """
        if isinstance(heard, pb.JobStatus):
            self.show_contact()
            self.look_at = now + QUIET_SECONDS
        elif heard is None and now >= self.look_at:
            self.look(failure, now)
            self.look_at = now + LOOK_SECONDS

    def look(self, failure: str, now: float) -> None:
        handle = self.handle
        try:
            pod = find_master(handle.client, handle.name)
            if is_running(pod):
                return self.show_contact(failure, now)
            if handle.over():
                return None
            trouble = trouble_of(pod) if pod is not None else MasterTrouble(self.refusal())
            failures = handle.client.read("Job", master_name(handle.name)).get("status", {}).get("failed", 0)
            begun = handle.state().memory
        except UnreachableError as error:
            trouble, failures, begun = MasterTrouble(str(error)), 0, "unknown"
        self.show_trouble(trouble)
        if self.gives_up(trouble, now) and not begun:
            handle.client.delete("Job", master_name(handle.name))
            wait_until_gone(handle.client, handle.name)
            raise UserError(f"job {handle.name}: {trouble.reason}; nothing of the job was left behind")
        if failures >= STARTS and not begun:
            where = f"{handle.name}{handle.flags}"
            raise JobFailedError(
                f"job {handle.name}: {trouble.reason}, {failures} times; see `elasticdl logs {where}`, "
                f"and remove it with `elasticdl delete {where}`"
            )
        return None

    def gives_up(self, trouble: MasterTrouble, now: float) -> bool:
        """Whether the image has been missing for too long, or will not come at all."""
        seconds = self.without_image.seconds(trouble.image is not None, now)
        return trouble.image is not None and (trouble.image.lasting or seconds >= self.image_timeout)

    def show_trouble(self, trouble: MasterTrouble) -> None:
        """An image that is tried for again and again is told of once."""
        before, self.trouble = self.trouble, trouble
        if trouble.reason != before.reason and not (trouble.image and before.image):
            self.screen.line(trouble.reason)

    def show_contact(self, failure: str = "", now: float = 0.0) -> None:
        """``failure``: why a master that runs does not answer; empty if it does."""
        lost = self.unreached.seconds(bool(failure), now) >= UNREACHED_SECONDS
        if lost and not self.unreached_told:
            self.unreached_told = True
            why = self.handle.missing_right() or failure
            self.screen.line(f"its master runs but can't be reached: {why}; it is tried again")
        if not failure and self.unreached_told:
            self.unreached_told = False
            self.screen.line("its master is reached again")

    def refusal(self) -> str:
        """Why the cluster makes no pod for the master."""
        involved = f"involvedObject.kind=Job,involvedObject.name={master_name(self.handle.name)}"
        events = self.handle.client.list("Event", field_selector=f"{involved},reason=FailedCreate")
        newest = max(events, key=lambda event: str(event.get("lastTimestamp")), default=None)
        if newest is None:
            return trouble_of(None).reason
        return f"the cluster does not take its master's pod: {without_name(str(newest['message']))}"
