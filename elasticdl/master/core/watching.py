"""Who is silent, late or stuck, and what is done about it.

`_Look` says who is suspected, of what and since when, who is asked where a worker stands, what is shown of that, and who is given
up; `elasticdl.master.core.rule` says after how long. Where a worker stands is shown in the journal, in the status and in the reason for
which it is given up.

Silent: no sign of life for ``heartbeat_timeout``, or no session for as long. A worker that has not yet asked for a world may be
importing or reading data, during which Python can't send heartbeats: it has until its deadline.
Stuck: its count of progress stands still for too long. A worker that waits in a collective for others is not stuck. If all
members wait, their collective hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeVar

from elasticdl.job.messages import DumpStacks, Heartbeat, Notice
from elasticdl.master.core.events import Instruction, ReadStacks, Record, StacksFound, Tell
from elasticdl.master.core.rule import GIVE_UP, GIVE_UP_MOVING, ProgressLimits, RuledJob
from elasticdl.master.core.values import LEAVING, WorkerState
from elasticdl.master.core.worker_record import Records, StackReport, Suspicion, SuspicionKind, WorkerRecord

# What heartbeats tell of workers. `elasticdl.master.core.watching` judges from that who is silent or stuck.


class Liveness:
    def __init__(self, records: Records, heartbeat_timeout: float, progress_limits: ProgressLimits) -> None:
        self._records = records
        self._heartbeat_timeout = heartbeat_timeout
        self._progress_limits = progress_limits
        self._looked: float | None = None
        self.save_problem = ""  # why the state can't be saved, if so: then what was decided is not carried out

    def heard(self, worker_id: int, beat: Heartbeat, now: float) -> None:
        record = self._records.get(worker_id)
        if record is None or record.pulse is None or not record.connected:
            return
        pulse = record.pulse
        if record.state in (WorkerState.MEMBER, WorkerState.DRAINING):
            pulse.steps += record.step != beat.step
            record.step = beat.step
        if beat.progress != pulse.progress:
            # What was heard late, since the master was held up, says nothing about how long the member took.
            if record.state is WorkerState.MEMBER and not self._was_absent(now):
                self._progress_limits.moved(pulse, now)
            pulse.progress, pulse.moved = beat.progress, now
        pulse.heard, pulse.waiting = now, beat.waiting
        self._progress_limits.ending = self._progress_limits.ending or beat.ending
        pulse.times = beat.times if beat.world_version == record.world_version else None

    def restart(self, worker_ids: Sequence[int], now: float) -> None:
        """Something new was asked of them: time without progress counts from now."""
        for worker_id in worker_ids:
            if (record := self._records.get(worker_id)) and record.pulse:
                record.pulse.moved, record.pulse.waiting, record.pulse.steps = now, False, 0

    def forgive_own_absence(self, now: float) -> float:
        """With each tick. Time in which the master could not hear or act counts against no worker; returns how much.

        It could not hear while it was held up itself, and can't act while its state can't be saved.
        """
        was_absent, absence = self._was_absent(now), now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if not was_absent and not self.save_problem:
            return 0.0
        self._progress_limits.forgive(absence)
        for record in self._records.values():
            if record.pulse:
                record.pulse.heard = min(now, record.pulse.heard + absence)
                record.pulse.moved = min(now, record.pulse.moved + absence)
            if record.deadline is not None:
                record.deadline += absence
            if record.quiet_since is not None:
                record.quiet_since += absence
            if record.suspicion is not None:
                record.suspicion.asked += absence
        return absence

    def _was_absent(self, now: float) -> bool:
        """Whether the master was held up itself since it looked last."""
        return self._looked is not None and now - self._looked > self._heartbeat_timeout / 2


# Members that all wait for one another: which of them differ from the others.


MOST_SHOWN = 8  # of them to people
Kind = TypeVar("Kind", int, str)


def odd_ones(reports: Mapping[int, StackReport]) -> dict[int, str]:
    """Of members that all wait for one another: who does something else than most others, and how it shows.

    It has begun another number of collectives: fewer, or more if it left one out and went on to the next. Else it stands
    elsewhere. If they can't be told apart, as with two in two places, it is all of them; nobody, if nothing differs.
    """
    begun = {worker_id: report.collectives for worker_id, report in reports.items()}
    places = {worker_id: report.where for worker_id, report in reports.items()}
    odd, usual = _minority(begun)
    if odd:
        most = f"and most others {usual}" if usual is not None else "and each another number"
        return {each: f"it has begun {begun[each]} collectives, {most}" for each in odd}
    odd, place = _minority(places)
    return dict.fromkeys(odd, f"most others wait at {place}" if place is not None else "each waits elsewhere")


def _minority(kinds: Mapping[int, Kind]) -> tuple[list[int], Kind | None]:
    """Who is not of the commonest kind, and which that is; all and None, if there are several."""
    counts = Counter(kinds.values()).most_common(2)
    if len(counts) < 2:
        return [], None
    (usual, most), (_, second) = counts
    if most == second:
        return list(kinds), None
    return [each for each, kind in kinds.items() if kind != usual], usual


# Of `heartbeat_timeout`: later than workers leave a dump (`elasticdl.elastic.link.witness`), and in time for it to be read.
ASK_SHARE = 0.7
# Between asking a worker where it stands and killing it.
TIME_TO_DUMP = 1.0
# So long a worker may take to answer before its launcher is asked.
ANSWER_SECONDS = 2.0
# A worker that is to be given up must have been seen to stand still within so long; else it is asked once more.
FRESH_SECONDS = 10.0
# A worker that would be given up, but moves or does not answer, is asked again after so long: it may stand still by now.
LOOK_AGAIN = 60.0
# A worker that has run for so long without a session is named. By then its log says why, if it knows.
UNREACHED_SECONDS = 10.0


class StuckRule:
    def __init__(self) -> None:
        self._spared: Set[int] = frozenset()  # silent, and not given up at the last look

    def look(self, job: RuledJob, now: float) -> Iterator[Instruction]:
        look = _Look(job, now)
        spared_before, self._spared = self._spared, look.last_holders()
        yield from look.judge_silent(self._spared, spared_before)
        yield from look.judge_others()

    def told(self, job: RuledJob, worker_id: int, notice: Notice, now: float) -> list[Instruction]:
        """A worker says where it stands."""
        return _Look(job, now).take(worker_id, StackReport.told(notice.fields))

    def waits(self, job: RuledJob, worker_id: int, notice: Notice) -> list[Instruction]:
        """A worker that is not ready says what its own code waits for. It has until its deadline, all the same."""
        record = job.records.get(worker_id)
        if record is None or record.ready:
            return []
        record.waits = f"has waited for {notice.fields['seconds']:.0f} s at {notice.fields['where']}"
        return [Record("worker_waits", {**notice.fields, "worker": worker_id})]

    def found(self, job: RuledJob, event: StacksFound, now: float) -> list[Instruction]:
        """A launcher says where a worker stands."""
        record = job.records.get(event.worker_id)
        silent = record is not None and record.suspicion is not None and record.suspicion.kind is SuspicionKind.SILENT
        cut_off = ", so it may be cut off from the master" if silent and event.has_session else ""
        return _Look(job, now).take(event.worker_id, StackReport.found(event.text, event.state + cut_off))


class _Look:
    """All workers of a job at one moment."""

    def __init__(self, job: RuledJob, now: float) -> None:
        self._job, self._now = job, now
        self._settings, self._limits, self._records = job.settings, job.progress_limits, job.records
        members = job.rendezvous.active_members()
        self._members = len(members)
        # How long those of them have waited that wait for others.
        self._waits = [now - record.pulse.moved for record in members if record.pulse and record.pulse.waiting]
        self._left = bool(self._records.of(WorkerState.REJOINING))  # some have left the world, and ask for the next
        self._broken = job.rendezvous.broken

    def judge_others(self) -> Iterator[Instruction]:
        """Who is late or stuck, and whether all wait for one another; who is asked where it stands."""
        job, now = self._job, self._now
        late = [r for r in self._records.values() if r.deadline is not None and now > r.deadline]
        for record in late:
            if record.waits_for_successor or record.state in LEAVING:
                yield from job.give_up(record, f"had not left {self._settings.stop_grace:g} s after it was to", now)
        suspects = self._suspects(late)
        for record in self._records.values():
            yield from self._ask(record, suspects.get(record.worker_id))
        yield from self._judge_waiting(
            [self._records[each] for each, kind in suspects.items() if kind is SuspicionKind.WAITS]
        )
        for worker_id, kind in suspects.items():
            if kind is SuspicionKind.STUCK:
                yield from self._judge_stuck(self._records[worker_id])
            elif kind is SuspicionKind.LATE:
                yield from self._judge_late(self._records[worker_id])

    # ---- who is suspected ----

    def _suspects(self, late: Sequence[WorkerRecord]) -> dict[int, SuspicionKind]:
        """The last kind that is true of a worker counts."""
        limits, rendezvous, records = self._limits, self._job.rendezvous, self._records
        members = rendezvous.active_members()
        limits.ending = limits.ending or rendezvous.ending
        limits.waited([] if rendezvous.change else [record.pulse for record in members], self._now)
        still = self._still(members)
        waiting = {r.worker_id for r in still if r.pulse and r.pulse.waiting}
        found: dict[int, SuspicionKind] = {}
        if members and len(waiting) == len(members) and not rendezvous.broken:
            found |= {record.worker_id: SuspicionKind.WAITS for record in members}
        # A broken world must be left, so there waiting for others is no excuse.
        stuck = [r for r in still if rendezvous.broken or r.worker_id not in waiting]
        stuck += self._still(records.of(WorkerState.EXCLUDED))
        found |= {record.worker_id: SuspicionKind.STUCK for record in stuck}
        found |= {record.worker_id: SuspicionKind.LATE for record in late if record.live}
        quiet = [r for r in records.values() if r.quiet_since is not None and r.worker_id not in found]
        found |= {record.worker_id: kind for record in quiet if (kind := self._quiet_kind(record))}
        return found | {record.worker_id: SuspicionKind.SILENT for record in self._silent(ASK_SHARE)}

    def _still(self, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those among them whose count of progress stands still for long enough to be named."""
        return [r for r in records if (pulse := r.pulse) and self._now - pulse.moved > self._limits.until_named(pulse)]

    def _quiet_kind(self, record: WorkerRecord) -> SuspicionKind | None:
        seconds = self._seconds(record, SuspicionKind.ABSENT)
        is_over = record.state is WorkerState.FINISHED
        if seconds > self._settings.start_timeout:
            return SuspicionKind.OVER if is_over else SuspicionKind.ABSENT
        return SuspicionKind.UNREACHED if seconds > UNREACHED_SECONDS and not is_over else None

    def _silent(self, share: float) -> list[WorkerRecord]:
        """Of whom nothing was heard for this share of the time after which they are given up."""
        limit = share * self._settings.heartbeat_timeout
        return [
            record
            for record in self._records.values()
            if record.pulse and self._now - record.pulse.heard > limit and (record.ready or not record.connected)
        ]

    def _seconds(self, record: WorkerRecord, kind: SuspicionKind) -> float:
        """How long it has been so; 0 if that is not known."""
        pulse, deadline, since = record.pulse, record.deadline, record.quiet_since
        if kind in (SuspicionKind.STUCK, SuspicionKind.WAITS):
            since = pulse.moved if pulse else None
        elif kind is SuspicionKind.SILENT:
            since = pulse.heard if pulse else None
        elif kind is SuspicionKind.LATE:
            since = deadline - self._settings.start_timeout if deadline else None
        return 0.0 if since is None else self._now - since

    # ---- where they stand ----

    def _ask(self, record: WorkerRecord, kind: SuspicionKind | None) -> list[Instruction]:
        if kind is None:
            record.suspicion, record.remark = None, ""
            return []
        suspicion, seconds = record.suspicion, self._seconds(record, kind)
        out: list[Instruction] = []
        if suspicion is None or suspicion.kind is not kind:
            suspicion = record.suspicion = Suspicion(kind, self._now)
            out = self._questions(record, suspicion)
        elif not (suspicion.answered or suspicion.launcher_asked) and self._now - suspicion.asked > ANSWER_SECONDS:
            suspicion.launcher_asked = True
            out = [ReadStacks(record.worker_id)]
        # Who does not go on is shown once it is named. The others are from the first moment on.
        hidden = kind in (SuspicionKind.STUCK, SuspicionKind.WAITS) and not suspicion.named
        record.remark = "" if hidden else self._remark(record, suspicion, seconds)
        return out

    def _remark(self, record: WorkerRecord, suspicion: Suspicion, seconds: float) -> str:
        words = f"{suspicion.kind} for {seconds:.0f} s{suspicion}"
        if suspicion.kind is not SuspicionKind.UNREACHED:
            return words
        log = f"elasticdl logs {self._settings.job_name} --worker {record.worker_id}"
        return f"runs on {record.place}, {words}, see its log: `{log}`"

    def _questions(self, record: WorkerRecord, suspicion: Suspicion) -> list[Instruction]:
        if record.connected and suspicion.kind is not SuspicionKind.SILENT:
            return [Tell((record.worker_id,), DumpStacks())]
        suspicion.launcher_asked = True
        # Without a session it may be importing, and if it does not reach its master, its own log says so.
        return [] if suspicion.kind is SuspicionKind.UNREACHED else [ReadStacks(record.worker_id)]

    def _ask_again(self, record: WorkerRecord, suspicion: Suspicion) -> list[Instruction]:
        suspicion.asked, suspicion.answered, suspicion.launcher_asked = self._now, False, False
        return self._questions(record, suspicion)

    def take(self, worker_id: int, report: StackReport) -> list[Instruction]:
        """What a worker says itself counts for more than what its launcher says."""
        record = self._records.get(worker_id)
        suspicion = record.suspicion if record else None
        if record is None or suspicion is None or suspicion.answers or (suspicion.answered and not report.itself):
            return []
        suspicion.answered, suspicion.report, last = True, report, suspicion.named
        if last and (report.moves or (last.where, last.state) == (report.where, report.state)):
            return []  # that is known
        return self._name(record, suspicion) if self._is_news(record, suspicion) else []

    def _is_news(self, record: WorkerRecord, suspicion: Suspicion) -> bool:
        """Whether the worker is named for its last report."""
        match suspicion.kind:
            case SuspicionKind.STUCK:
                return not suspicion.moves or self._seconds(record, suspicion.kind) > self._limits.until_given_up
            case SuspicionKind.SILENT:
                return suspicion.named is not None
            # If all wait, only who differs from the others is named: a hang of which nobody is to blame is no remark about one member.
            case SuspicionKind.WAITS | SuspicionKind.UNREACHED:
                return False
            case _:
                return True

    def _name(self, record: WorkerRecord, suspicion: Suspicion, differs: str = "") -> list[Instruction]:
        """Tell people which worker it is, and where it stands, as far as that is known."""
        report = suspicion.named = suspicion.report or StackReport()
        seconds = round(self._seconds(record, suspicion.kind), 1)
        fields = {"worker": record.worker_id, "host": record.place, "why": str(suspicion.kind), "seconds": seconds}
        known = {"state": report.state, "where": report.where, "differs": differs, "stack": list(report.stack)}
        return [Record("worker_stuck", {**fields, **{key: value for key, value in known.items() if value}})]

    # ---- what is done about it ----

    def judge_silent(self, spared: Set[int], before: Set[int]) -> Iterator[Instruction]:
        """``spared``: the `last_holders`; ``before``: those of the last look."""
        for record in self._silent(1.0):
            pulse, suspicion, limit = record.pulse, record.suspicion, self._settings.heartbeat_timeout
            if record.worker_id not in spared and record.worker_id in before and pulse:
                # One of them is back: the others have the time that it takes to leave a dump and have it read.
                pulse.heard = self._now - ASK_SHARE * limit
            elif record.worker_id not in spared:
                reason = f"{'no heartbeat' if record.connected else 'no connection'} for {limit:g} s"
                yield from self._give_up(record, SuspicionKind.SILENT, reason)
            elif self._seconds(record, SuspicionKind.SILENT) > (limit := self._limits.until_given_up):
                yield from self._give_up(record, SuspicionKind.SILENT, f"no heartbeat for {limit:g} s")
            elif suspicion and suspicion.kind is SuspicionKind.SILENT and not suspicion.named:
                yield from self._name(record, suspicion)

    def last_holders(self) -> set[int]:
        """All members, if all are silent, or nearly: with them the state since the last checkpoint would be lost. Their processes are
        there, so they may be in calls that hold Python's lock."""
        if self._records.of(WorkerState.REJOINING):  # these hold it, too
            return set()
        nearly = {record.worker_id for record in self._silent(ASK_SHARE) if record.connected}
        members = {record.worker_id for record in self._job.rendezvous.active_members()}
        return members if members <= nearly else set()

    def _judge_late(self, record: WorkerRecord) -> Iterator[Instruction]:
        """It is warned of at once, and given up when it could show where it stands."""
        suspicion, reason = record.suspicion, f"not ready {self._settings.start_timeout:g} s after its start"
        if suspicion and suspicion.asked == self._now:
            stacks = "; its stacks are in its log" if record.connected else ""
            yield Record("warning", {"message": f"worker {record.worker_id}: {reason}{stacks}"})
        elif suspicion and self._now - suspicion.asked > TIME_TO_DUMP:
            # Others may do no better: it counts against the job.
            record.failure = record.failure or f"{reason}{suspicion}"
            yield from self._give_up(record, SuspicionKind.LATE, reason)

    def _judge_stuck(self, record: WorkerRecord) -> Iterator[Instruction]:
        """Give it up if its time is over, and it could show where it stands."""
        suspicion, seconds = record.suspicion, self._seconds(record, SuspicionKind.STUCK)
        if suspicion is None or self._now - suspicion.asked <= TIME_TO_DUMP or seconds <= self._limits.until_given_up:
            return
        if self._limits.given is None and (spared := self._look_again(record, suspicion)) is not None:
            yield from spared
            return
        limit = self._settings.progress_timeout or seconds
        yield from self._give_up(record, SuspicionKind.STUCK, f"no progress for {limit:.4g} s")

    def _give_up(self, record: WorkerRecord, kind: SuspicionKind, reason: str) -> Iterator[Instruction]:
        """People are told where it stands, if that is known to be what is wrong with it."""
        suspicion = record.suspicion if record.suspicion and record.suspicion.kind is kind else None
        if suspicion and not suspicion.named and (str(suspicion) or kind is not SuspicionKind.SILENT):
            yield from self._name(record, suspicion)
        yield from self._job.give_up(record, f"{reason}{suspicion or ''}", self._now)

    def _look_again(self, record: WorkerRecord, suspicion: Suspicion) -> list[Instruction] | None:
        """Before it is killed: a look of minutes ago may have met the one moment in which it stood still, or was busy yet.

        None if it is to be given up now.
        """
        since, seconds = self._now - suspicion.asked, self._seconds(record, SuspicionKind.STUCK)
        if not suspicion.answered and since <= ANSWER_SECONDS + TIME_TO_DUMP:
            return []
        stands_still = suspicion.answers and not suspicion.moves
        does_something = suspicion.answers and suspicion.moves and not self._broken
        spared = seconds <= GIVE_UP_MOVING and (does_something or self._is_like_others(record))
        if since > (FRESH_SECONDS if stands_still and not spared else LOOK_AGAIN):
            return self._ask_again(record, suspicion)
        return [] if spared else None

    def _is_like_others(self, record: WorkerRecord) -> bool:
        """All are stuck: to kill them is to lose the state. Or some were sooner through with what all may have done."""
        alone = self._left or self._members == 1 or record.state is not WorkerState.MEMBER
        return not alone and max(self._waits, default=0.0) <= GIVE_UP

    def _judge_waiting(self, members: Sequence[WorkerRecord]) -> Iterator[Instruction]:
        """All members wait for one another: name who does something else than the others, and have all leave the world."""
        suspicions = {record.worker_id: record.suspicion for record in members if record.suspicion}
        if not suspicions:
            return
        reports = {worker_id: each.report for worker_id, each in suspicions.items() if each.report}
        asked = max(suspicion.asked for suspicion in suspicions.values())
        if len(reports) < len(suspicions) and self._now - asked <= TIME_TO_DUMP:
            return
        odd = odd_ones(reports) if len(reports) == len(suspicions) else {}
        shown = dict(list(odd.items())[:MOST_SHOWN])
        for record in members:
            if record.worker_id in shown and not suspicions[record.worker_id].named:
                yield from self._name(record, suspicions[record.worker_id], shown[record.worker_id])
        seconds = min(self._seconds(record, SuspicionKind.WAITS) for record in members)
        if seconds > self._limits.until_given_up:
            limit = self._settings.progress_timeout or seconds
            cause = f"no progress for {limit:.4g} s, all members wait for one another"
            differ = "; ".join(f"worker {each}{reports[each]}, {how}" for each, how in shown.items())
            differ += f"; and {len(odd) - len(shown)} more" if len(odd) > len(shown) else ""
            places = {report.where for report in reports.values()}
            where = f", at {places.pop()}" if len(places) == 1 else ""
            self._job.leave_world(cause + (f": {differ}" if differ else where), self._now)
