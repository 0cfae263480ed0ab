"""What a rule is: it looks at the job with each tick, and says what is to be done.

| rule | question |
| --- | --- |
| `elasticdl.master.rules.watching` | who is silent, late or stuck, and who is given up for it |
| `elasticdl.master.rules.slowness` | who holds the others up, and who is replaced for it |
| `elasticdl.master.rules.sizing` | how fast the job is with how many workers, and how many pay |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from elasticdl.job.spec import WorkerRange
from elasticdl.master.rules.progress_limits import ProgressLimits
from elasticdl.master.state.instructions import Instruction
from elasticdl.master.state.records_by_state import Records
from elasticdl.master.state.rendezvous import Rendezvous
from elasticdl.master.state.training import Training
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord


class RuledJob(Protocol):
    """What a rule may see of the job, and what it may ask of it. What is asked is done at once; the instructions say the rest."""

    settings: Settings
    limits: WorkerRange  # as they are now
    records: Records
    rendezvous: Rendezvous
    training: Training
    progress_limits: ProgressLimits

    @property
    def somebody_seems_slow(self) -> bool:
        """A member looks slow, and has not been watched for long enough to say so."""

    def give_up(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        """Kill this worker, and replace it."""

    def replace(self, record: WorkerRecord, reason: str, now: float, *, first: bool) -> list[Instruction]:
        """Let this worker leave, and another take its place. ``first``: only ask for the other; the rule lets it go later (`outgoing`)."""

    def leave_world(self, cause: str, now: float) -> None:
        """Let all members leave their world, and form the next."""


class Rule(Protocol):
    """A rule remarks on workers in their records. Whatever else is to change, it asks of the job."""

    def look(self, job: RuledJob, now: float) -> Iterable[Instruction]:
        """Called with each tick, until it is decided how the job ends."""
