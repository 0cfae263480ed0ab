"""Who is silent, late or stuck as time passes, and what is done about it.

Who is suspected is asked where it stands: over its session, or by its launcher where it does not answer. What it, or the
launcher, tells goes into the journal, the status and the reason for which it is given up. `elasticdl.master.rules.patience`
says how long each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elasticdl.master.rules.liveness import ASK_SHARE, Liveness
from elasticdl.master.rules.patience import GIVE_UP_MOVING, UNLEARNT_GIVE_UP
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.instructions import Instruction, Record
from elasticdl.master.state.lifecycle import LEAVING, WorkerState
from elasticdl.master.state.rendezvous import NOBODY, Rendezvous
from elasticdl.master.state.standing import Standing, Suspicion, Why, common_place, examples, odd_ones
from elasticdl.master.state.values import Settings
from elasticdl.master.state.worker_record import WorkerRecord

# Between asking a worker where it stands and killing it.
TIME_TO_DUMP = 1.0
# So long a worker may take to answer before its launcher is asked.
ANSWER_SECONDS = 2.0
# Who is to be given up was seen to stand still so lately, or is asked once more.
FRESH_SECONDS = 10.0
# Who would be given up, and moves or does not answer, is asked again as often: it may stand still by now.
LOOK_AGAIN = 60.0
# A worker that has run for so long without a session is named; its first word of that is in its log by then.
UNREACHED_SECONDS = 10.0
# Its log is read again when the time without a session has grown by this share.
READ_AGAIN_SHARE = 0.3
MOST_NAMED = 8
# Logs of workers without a session: all of a large job have none while they import, and what keeps them keeps the first.
MOST_READ = 8
QUIET = (Why.ABSENT, Why.OVER)  # of whom it is told only
GiveUp = Callable[[WorkerRecord, str, float], list[Instruction]]


class _Crew:
    """Members of the world, and how long those that wait for others have waited, as of one look."""

    def __init__(self, rendezvous: Rendezvous, now: float) -> None:
        members = rendezvous.active_members()
        waits = [now - record.pulse.moved for record in members if record.pulse and record.pulse.waiting]
        self.members, self.waiting = len(members), len(waits)
        self.shortest_wait, self.longest_wait = min(waits, default=0.0), max(waits, default=0.0)
        self.left = bool(rendezvous.of(WorkerState.REJOINING))  # some have left the world, and ask for the next
        self.broken = rendezvous.broken


def _unreached(workers: Sequence[int], problem: str) -> str:
    ids = ", ".join(map(str, workers[:MOST_NAMED])) + (", ..." if len(workers) > MOST_NAMED else "")
    who = f"worker {ids} runs and has" if len(workers) == 1 else f"workers {ids} run and have"
    return f"{who} not reached the master{problem}"


class Watch:
    def __init__(
        self,
        records: Mapping[int, WorkerRecord],
        liveness: Liveness,
        rendezvous: Rendezvous,
        settings: Settings,
        give_up: GiveUp,
    ) -> None:
        self._records = records
        self._liveness = liveness
        self._patience = liveness.patience
        self._rendezvous = rendezvous
        self._settings = settings
        self._give_up = give_up
        self._spared: set[int] = set()  # silent, and not given up at the last look

    def look(self, now: float) -> list[Instruction]:
        """To be called regularly."""
        settings = self._settings
        crew = _Crew(self._rendezvous, now)
        out: list[Instruction] = []
        spared, before = self._last_holders(now), self._spared
        self._spared = spared
        for record, reason in self._liveness.silent(now):
            if record.worker_id not in spared and record.worker_id in before and record.pulse:
                # One of them is back: the others have the time that it takes to leave a dump and have it read.
                record.pulse.heard = now - ASK_SHARE * settings.heartbeat_timeout
            elif record.worker_id not in spared:
                out += self._give_up_silent(record, reason, now)
            elif self._seconds(record, Why.SILENT, now) > (limit := self._patience.given or UNLEARNT_GIVE_UP):
                out += self._give_up_silent(record, f"no heartbeat for {limit:g} s", now)
            elif record.suspicion and record.suspicion.why is Why.SILENT and not record.suspicion.named:
                out += self._name(record, now)
        late = [r for r in self._records.values() if r.deadline is not None and now > r.deadline]
        for record in late:
            if record.waits_for_successor or record.state in LEAVING:
                out += self._give_up(record, f"had not left {settings.stop_grace:g} s after it was to", now)
        suspects = self._suspects(late, now)
        for record in self._records.values():
            out += self._ask(record, suspects.get(record.worker_id), now)
        waiting = [record for record in self._records.values() if suspects.get(record.worker_id) is Why.WAITS]
        out += self._judge_waiting(waiting, now)
        for worker_id, why in suspects.items():
            if why in (Why.STUCK, Why.LATE):
                out += self._judge(self._records[worker_id], why, crew, now)
        return out

    def told(self, event: e.NoticeReported, now: float) -> list[Instruction]:
        """A worker says where it stands."""
        return self._stands(event.worker_id, Standing.told(event.fields), now)

    def waits(self, event: e.NoticeReported) -> list[Instruction]:
        """A worker that is not ready says what its own code waits for. It has until its deadline, all the same."""
        record = self._records.get(event.worker_id)
        if record is None or record.ready:
            return []
        record.waits = f"has waited for {event.fields['seconds']:.0f} s at {event.fields['where']}"
        return [Record("worker_waits", {**event.fields, "worker": event.worker_id})]

    def found(self, event: e.StacksFound, now: float) -> list[Instruction]:
        """A launcher says where a worker stands."""
        record = self._records.get(event.worker_id)
        silent = record is not None and record.suspicion is not None and record.suspicion.why is Why.SILENT
        cut_off = ", so it may be cut off from the master" if silent and event.has_session else ""
        return self._stands(event.worker_id, Standing.found(event.text, event.state + cut_off), now)

    def unreached(self) -> str:
        """Who runs and says in its log that it does not reach the master, and why; empty if nobody does."""
        groups: dict[str, list[int]] = {}
        for record in self._records.values():
            standing = record.suspicion and record.suspicion.standing
            if standing and standing.unreached:
                groups.setdefault(str(standing), []).append(record.worker_id)
        return "; ".join(_unreached(workers, problem) for problem, workers in groups.items())

    # ---- who is suspected ----

    def _suspects(self, late: list[WorkerRecord], now: float) -> dict[int, Why]:
        patience, rendezvous = self._patience, self._rendezvous
        members = rendezvous.active_members()
        patience.ending = patience.ending or rendezvous.ending
        patience.waited([] if rendezvous.change else [record.pulse for record in members], now)
        still = self._liveness.still(members, now, patience.until_named)
        waiting = [r for r in still if r.pulse and r.pulse.waiting]
        found: dict[int, Why] = {}
        if members and len(waiting) == len(members) and not rendezvous.broken:
            found |= {record.worker_id: Why.WAITS for record in members}
        # A broken world must be left, so there waiting for others is no excuse.
        stuck = [r for r in still if rendezvous.broken or r not in waiting]
        stuck += self._liveness.still(rendezvous.of(WorkerState.EXCLUDED), now, patience.until_named)
        found |= {record.worker_id: Why.STUCK for record in stuck}
        found |= {record.worker_id: Why.LATE for record in late if record.live}
        quiet = [r for r in self._records.values() if r.quiet_since is not None and r.worker_id not in found]
        found |= {record.worker_id: why for record in quiet if (why := self._why_quiet(record, now))}
        return found | {record.worker_id: Why.SILENT for record in self._liveness.nearly_silent(now)}

    def _why_quiet(self, record: WorkerRecord, now: float) -> Why | None:
        seconds = self._seconds(record, Why.ABSENT, now)
        is_over = record.state is WorkerState.FINISHED
        if seconds > self._settings.start_timeout:
            return Why.OVER if is_over else Why.ABSENT
        return Why.UNREACHED if seconds > UNREACHED_SECONDS and not is_over else None

    def _seconds(self, record: WorkerRecord, why: Why, now: float) -> float:
        """How long it has been so."""
        if why is Why.LATE:
            return self._settings.start_timeout + now - (record.deadline or now)
        if why in (Why.UNREACHED, *QUIET):
            return now - (now if record.quiet_since is None else record.quiet_since)
        if record.pulse is None:
            return 0.0
        return now - (record.pulse.heard if why is Why.SILENT else record.pulse.moved)

    # ---- where they stand ----

    def _ask(self, record: WorkerRecord, why: Why | None, now: float) -> list[Instruction]:
        if why is None:
            record.suspicion, record.remark = None, ""
            return []
        suspicion = record.suspicion
        seconds = self._seconds(record, why, now)
        out: list[Instruction] = []
        if suspicion is None or suspicion.why is not why:
            suspicion = record.suspicion = Suspicion(why, now)
            out = self._questions(record, suspicion)
        elif self._is_named_though_it_moves(record, suspicion, seconds):
            suspicion.is_due = True
            out = self._ask_again(record, suspicion, now)
        elif why is Why.UNREACHED:
            since_asked = now - suspicion.asked
            if since_asked > READ_AGAIN_SHARE * (seconds - since_asked):
                out = self._ask_again(record, suspicion, now)
        elif not (suspicion.answered or suspicion.launcher_asked) and now - suspicion.asked > ANSWER_SECONDS:
            suspicion.launcher_asked = True
            out = [i.ReadStacks(record.worker_id)]
        # A world's end of which nobody is to blame is no remark about one of its members.
        words = f"{why} for {seconds:.0f} s{suspicion}"
        if why is Why.UNREACHED:
            perhaps = "" if str(suspicion) else ", perhaps since it still imports"
            log = f"elasticdl logs {self._settings.job_name} --worker {record.worker_id}"
            words = f"runs on {record.place} and {words}{perhaps}; its log: `{log}`"
        is_told = suspicion.named or suspicion.is_due or why in (Why.LATE, Why.SILENT, Why.UNREACHED, *QUIET)
        record.remark = words if is_told else ""
        return out

    def _questions(self, record: WorkerRecord, suspicion: Suspicion) -> list[Instruction]:
        if suspicion.why is not Why.SILENT and record.connected:
            return [i.DumpStacks(record.worker_id)]
        if suspicion.why is Why.UNREACHED and self._logs_read() >= MOST_READ:
            return []
        suspicion.launcher_asked = True
        return [(i.ReadLog if suspicion.why is Why.UNREACHED else i.ReadStacks)(record.worker_id)]

    def _logs_read(self) -> int:
        """Of how many that have no session."""
        suspicions = (record.suspicion for record in self._records.values())
        return sum(s is not None and s.why is Why.UNREACHED and s.launcher_asked for s in suspicions)

    def _ask_again(self, record: WorkerRecord, suspicion: Suspicion, now: float) -> list[Instruction]:
        suspicion.asked, suspicion.answered, suspicion.launcher_asked = now, False, False
        return self._questions(record, suspicion)

    def _is_named_though_it_moves(self, record: WorkerRecord, suspicion: Suspicion, seconds: float) -> bool:
        unnamed = suspicion.why is Why.STUCK and suspicion.moves and not (suspicion.named or suspicion.is_due)
        return unnamed and seconds > self._patience.until_named_though_it_moves(record.pulse)

    def _stands(self, worker_id: int, standing: Standing, now: float) -> list[Instruction]:
        """What a worker says itself counts for more than what its launcher says."""
        record = self._records.get(worker_id)
        suspicion = record.suspicion if record else None
        if record is None or suspicion is None or suspicion.answers:
            return []
        if suspicion.answered and not standing.itself:
            return []
        suspicion.answered, suspicion.standing, last = True, standing, suspicion.named
        if last and (standing.moves or (last.where, last.state) == (standing.where, standing.state)):
            return []  # that is known
        if suspicion.why in (Why.LATE, *QUIET) or (suspicion.why is Why.SILENT and last):
            return self._name(record, now)
        if suspicion.why is Why.UNREACHED:  # without a word of its own it may be importing, which is no news
            return self._name(record, now) if standing.unreached else []
        is_stuck = suspicion.why is Why.STUCK and (suspicion.is_due or not standing.moves)
        return self._name(record, now) if is_stuck else []

    def _name(self, record: WorkerRecord, now: float, differs: str = "") -> list[Instruction]:
        """Tell people which worker it is, and where it stands, as far as that is known."""
        suspicion = record.suspicion
        if suspicion is None:
            return []
        standing = suspicion.named = suspicion.standing or Standing()
        seconds = round(self._seconds(record, suspicion.why, now), 1)
        fields = {"worker": record.worker_id, "host": record.place, "why": str(suspicion.why), "seconds": seconds}
        known = {"state": standing.state, "where": standing.where, "differs": differs, "stack": list(standing.stack)}
        return [Record("worker_stuck", {**fields, **{key: value for key, value in known.items() if value}})]

    # ---- what is done about it ----

    def _judge(self, record: WorkerRecord, why: Why, crew: _Crew, now: float) -> list[Instruction]:
        """Give it up if its time is over, and it could show where it stands."""
        suspicion = record.suspicion
        if suspicion is None or now - suspicion.asked < TIME_TO_DUMP:
            if why is Why.LATE and suspicion and suspicion.asked == now:
                return self._warn_of_late(record)
            return []
        if why is Why.LATE:
            reason = f"not ready {self._settings.start_timeout:g} s after its start"
            # Others may do no better: it counts against the job.
            record.failure = record.failure or f"{reason}{suspicion}"
        elif not self._is_over(record, crew, now):
            return []
        elif self._patience.given is None and (spared := self._look_again(record, suspicion, crew, now)) is not None:
            return spared
        else:
            limit = self._settings.progress_timeout or self._seconds(record, why, now)
            reason = f"no progress for {limit:.4g} s"
        named = [] if suspicion.named else self._name(record, now)
        return [*named, *self._give_up(record, reason + str(suspicion), now)]

    def _warn_of_late(self, record: WorkerRecord) -> list[Instruction]:
        warning = f"worker {record.worker_id}: not ready {self._settings.start_timeout:g} s after its start"
        if record.connected:
            warning += "; its stacks are in its log"
        return [Record("warning", {"message": warning})]

    def _is_over(self, record: WorkerRecord, crew: _Crew, now: float) -> bool:
        """Whether a stuck worker's time is over, if it stands still. As it is killed then, what was learnt only counts where
        that helps."""
        seconds = self._seconds(record, Why.STUCK, now)
        if self._patience.given is not None:
            return seconds > self._patience.given
        others = crew.members - (record.state is WorkerState.MEMBER)
        waiting = crew.waiting - bool(record.state is WorkerState.MEMBER and record.pulse and record.pulse.waiting)
        if others and not waiting and not crew.left and record.state is WorkerState.MEMBER:
            # All are stuck: it is no fault of theirs, and to kill them is to lose the state.
            return seconds > GIVE_UP_MOVING
        awaited = waiting == others > 0
        if waiting and not crew.left and not crew.broken and record.state is WorkerState.MEMBER:
            # All may have done the same (a validation of their own), and some were through with it sooner.
            seconds = min(seconds, crew.shortest_wait if awaited else crew.longest_wait)
        helps = crew.left or awaited or record.state is WorkerState.EXCLUDED
        return seconds > (self._patience.until_given_up(record.pulse) if helps else UNLEARNT_GIVE_UP)

    def _look_again(
        self, record: WorkerRecord, suspicion: Suspicion, crew: _Crew, now: float
    ) -> list[Instruction] | None:
        """Before it is killed: a look of minutes ago may have met the one moment in which it stood still, or was busy yet.

        None if it is to be given up now.
        """
        since, seconds = now - suspicion.asked, self._seconds(record, Why.STUCK, now)
        if not suspicion.answered and since < ANSWER_SECONDS + TIME_TO_DUMP:
            return []
        stands_still = suspicion.answers and not suspicion.moves
        if since > (FRESH_SECONDS if stands_still else LOOK_AGAIN):
            return self._ask_again(record, suspicion, now)
        if stands_still:
            return None
        if suspicion.answers:
            return None if crew.broken or seconds > GIVE_UP_MOVING else []
        # Its heartbeats come, so it runs now and then.
        return None if seconds > UNLEARNT_GIVE_UP else []

    def _judge_waiting(self, members: list[WorkerRecord], now: float) -> list[Instruction]:
        """All members wait for one another: name who does something else than the others, and have all leave the world."""
        suspicions = {record.worker_id: record.suspicion for record in members if record.suspicion}
        if not suspicions:
            return []
        standings = {worker_id: each.standing for worker_id, each in suspicions.items() if each.standing}
        asked = max(suspicion.asked for suspicion in suspicions.values())
        if len(standings) < len(suspicions) and now - asked < TIME_TO_DUMP:
            return []
        odd = odd_ones(standings) if len(standings) == len(suspicions) else {}
        shown = examples(odd, standings)
        out: list[Instruction] = []
        for worker_id, how in shown.items():
            if not suspicions[worker_id].named:
                out += self._name(self._records[worker_id], now, how)
        seconds = min(self._seconds(record, Why.WAITS, now) for record in members)
        if seconds > max(self._patience.until_given_up(record.pulse) for record in members):
            limit = self._settings.progress_timeout or seconds
            cause = f"no progress for {limit:.4g} s, all members wait for one another"
            differ = "; ".join(f"worker {each}{standings[each]}, {how}" for each, how in shown.items())
            differ += f"; and {len(odd) - len(shown)} more" if len(odd) > len(shown) else ""
            cause += f": {differ}" if differ else common_place(list(standings.values()))
            self._rendezvous.begin(now, broken=True).causes[NOBODY] = cause
        return out

    def _last_holders(self, now: float) -> set[int]:
        """All members, if all are silent, or nearly: with them the state since the last checkpoint would be lost. Their processes are
        there, so they may be in calls that hold Python's lock."""
        if self._rendezvous.of(WorkerState.REJOINING):  # these hold it, too
            return set()
        nearly = {record.worker_id for record in self._liveness.nearly_silent(now) if record.connected}
        members = {record.worker_id for record in self._rendezvous.active_members()}
        return members if members <= nearly else set()

    def _give_up_silent(self, record: WorkerRecord, reason: str, now: float) -> list[Instruction]:
        suspicion = record.suspicion
        if suspicion is None or suspicion.why is not Why.SILENT or not str(suspicion):
            return self._give_up(record, reason, now)
        return [*self._name(record, now), *self._give_up(record, reason + str(suspicion), now)]
