"""What the workers of a job on a cluster print, as it comes, beside what else is shown of the job.

As `elasticdl.cli.local.local_prints`, with the logs of pods. When a line was written is told by its node's clock, and when a world was
formed by the master's: where they differ, a line may be shown twice, or left out, as another worker becomes rank 0.
"""

from __future__ import annotations

import time
from datetime import datetime

from elasticdl.cli.cluster import pod_logs
from elasticdl.cli.cluster.pod_logs import LogLine, LogReaders
from elasticdl.cli.outlets import Stream
from elasticdl.cli.printed import POLL, Lines, Prints, prefix_among, workers_of
from elasticdl.cli.screens import Screen
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.journal import Entry
from elasticdl.kube.client import Client
from elasticdl.kube.job_pods import find_pods

_ALWAYS = float("inf")


class PodPrints(Prints):
    def __init__(self, client: Client, job: str, ranks: tuple[int, ...] | None, screen: Screen) -> None:
        super().__init__(ranks)
        self._client = client
        self._job = job
        self._screen = screen
        self._readers = LogReaders(client, timestamps=True)
        self._since = dict.fromkeys(ranks or (), 0.0)  # by worker: it is shown from then on
        self._until = dict.fromkeys(ranks or (), _ALWAYS)
        self._pods: dict[int, str | None] = {}  # their names by worker; None if that is not told
        self._lines: dict[str, Lines] = {}
        self._told: set[str] = set()

    def hear(self, entry: Entry) -> None:
        """Of the journal."""
        if entry["event"] == "worker_started":
            self._pods = {**self._pods, entry["worker"]: entry.get("place")}
        if entry["event"] != "world_formed" or self._ranks is None:
            return
        workers = workers_of(self._ranks, entry["members"])
        for worker, until in self._until.items():
            if until == _ALWAYS and worker not in workers:
                self._until[worker] = entry["time"]
        for worker in workers:
            if self._until.get(worker) != _ALWAYS:
                self._until, self._since = {**self._until, worker: _ALWAYS}, {**self._since, worker: entry["time"]}

    # -- details --

    def _every_lines(self) -> list[Lines]:
        return list(self._lines.values())

    def _close(self) -> None:
        self._readers.close()

    def _run(self) -> None:
        is_last, look_at = False, 0.0
        while not is_last:
            is_last = self._over.is_set()
            if is_last or time.monotonic() >= look_at:
                self._take_up()
                look_at = time.monotonic() + pod_logs.LOOK_SECONDS
            for line in self._readers.rest() if is_last else self._readers.lines(POLL):
                self._show(line)

    def _take_up(self) -> None:
        try:
            self._find_pods()
            refusal = self._readers.refusal
        except ElasticDLError as error:
            refusal = str(error)
        if refusal and refusal not in self._told:
            self._told.add(refusal)
            self._screen.line(f"what workers print can't be shown at the moment: {refusal}")

    def _find_pods(self) -> None:
        pods = [pod for pod in find_pods(self._client, self._job) if pod_logs.is_of_workers(pod)]
        if self._ranks is not None:  # of the others nothing is shown
            names = {self._pods.get(worker) for worker, until in self._until.items() if until == _ALWAYS}
            pods = [pod for pod in pods if None in names or pod["metadata"]["name"] in names]
        self._readers.take_up(pods)

    def _show(self, line: LogLine) -> None:
        worker = _number(line.writer)
        if worker is None or not self._is_shown(worker, line.when):
            return
        if line.writer not in self._lines:
            self._lines[line.writer] = Lines(self._screen, Stream.OUT, prefix_among(self._ranks, worker))
        self._lines[line.writer].feed(f"{line.text}\n".encode(errors="replace"))

    def _is_shown(self, worker: int, when: str) -> bool:
        if self._ranks is None:
            return True
        if not when:  # the cluster does not tell
            return self._until.get(worker) == _ALWAYS
        moment = datetime.fromisoformat(when).timestamp()
        return worker in self._since and self._since[worker] <= moment < self._until[worker]


def _number(writer: str) -> int | None:
    """Of a worker; None for the master and for an agent."""
    head, _, number = writer.partition("-")
    return int(number) if head == "worker" and number.isdecimal() else None
