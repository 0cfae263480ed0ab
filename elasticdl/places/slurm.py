"""Places of a Slurm cluster: each is a batch job of its own that runs an agent (`elasticdl.places.agent`).

An allocation of Slurm does not grow, so an elastic job has many: a pending one costs nothing, and one that a job of higher priority
takes away is one place lost. Slurm's own way to run a job again (``--requeue``) is off: the master asks for another place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from elasticdl.common.backoff import Backoff
from elasticdl.common.credentials import NODE, PLACE
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.retry import Background, retry
from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlacesRefused, PlaceState

POLL_SECONDS = 2.0
CLOSE_SECONDS = 60.0
LONGEST_DELAY = 60.0
FIND_SECONDS = 60.0
FORGOTTEN = "whoever gave its place does not know it any more"
_log = logging.getLogger(__name__)


class Provider(Protocol):
    """Each request raises UnreachableError if there is no answer: then it is tried again, after a delay that grows."""

    async def list(self) -> Mapping[str, Place | PlaceLost]:
        """All places of this job by their ids, and for a while also those that have ended."""

    async def ask(self, avoid: AbstractSet[str]) -> str:
        """Ask for one more place, on none of these nodes if there is any other; returns its id.

        Raises:
            UserError: there will never be any, until somebody mends what this says.
        """

    async def end(self, place_ids: Sequence[str], *, at_once: bool) -> None:
        """End these places, or take them off the queue: SIGTERM, and SIGKILL after the time that is usual there, or SIGKILL at once.

        Nothing happens for one that has ended by itself.
        """


class PolledPlaces:
    """`elasticdl.places.base.Places` of whoever can only be asked: a batch system, machines that are reached by ssh."""

    def __init__(self, provider: Provider, report: PlaceReport, seconds: float = POLL_SECONDS) -> None:
        """``seconds``: between two requests for the list."""
        self._provider, self._report, self._seconds = provider, report, seconds
        self._places: dict[str, Place] = {}
        self._given_back: dict[str, bool] = {}  # by id: at once, or with some grace
        self._to_end: dict[str, bool] = {}  # those of them of which the provider is still to be told
        self._most = 0
        self._avoid: AbstractSet[str] = frozenset()
        self._refused = ""  # why nothing is had at present
        self._unsure = False  # a place was asked for without an answer yet, and no list since says whether it came
        self._changed, self._seen = asyncio.Event(), asyncio.Event()
        self._background = Background("places are watched", lambda why: report(LauncherFailed(why)))

    async def found(self) -> Sequence[Place]:
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        listing = await retry(self._provider.list, "list the places of the job", backoff, FIND_SECONDS)
        # What has ended is said to be lost by the next list, as its end may be news.
        self._places = {
            place_id: place if isinstance(place, Place) else Place(place_id, state=PlaceState.LOST)
            for place_id, place in listing.items()
        }
        self._most = len(self._wanted())  # until that is said
        self._background.start(self._keep())
        return tuple(self._places.values())

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        self._most, self._avoid = most, avoid
        self._drop_surplus()
        self._changed.set()

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        place, told = self._places.get(place_id), self._given_back.get(place_id)
        if place and place.state is not PlaceState.LOST and (told is None or at_once > told):
            self._given_back[place_id] = self._to_end[place_id] = at_once
            self._changed.set()

    async def close(self, *, keep: bool = False) -> None:
        try:
            if not keep:
                await self._end_all()
        finally:
            await self._background.cancel()
            self._places.clear()

    async def _end_all(self) -> None:
        self.want(0, frozenset())
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._places or self._unsure:
                    for place_id in self._places:  # one that was being asked for comes later
                        self.give_back(place_id, at_once=False)
                    self._seen.clear()
                    await self._seen.wait()
        except TimeoutError:
            left = ", ".join(self._places) or "that were asked for"
            _log.error("places %s have not ended in %g s: leaving them behind", left, CLOSE_SECONDS)

    async def _keep(self) -> None:
        """Look what became of the places, end those that were given back, and ask for those that are missing, one after the other."""
        backoff = Backoff(random.Random(), first=self._seconds, longest=LONGEST_DELAY)
        while True:
            self._changed.clear()
            delay = self._seconds
            try:
                self._see(await self._provider.list())
                not_ended = None
                while (due := self._to_end and not not_ended) or len(self._wanted()) < self._most:
                    try:
                        await (self._end() if due else self._ask())
                    except UnreachableError as error:
                        if not due:
                            raise
                        not_ended = error  # which keeps nobody from having another place
                if not_ended:
                    raise not_ended
                backoff.reset()
                self._refuse("")
            except UserError as error:
                self._report(LauncherFailed(str(error)))
                delay = backoff.delay()
            except UnreachableError as error:
                delay = backoff.delay()
                self._changed.clear()
                self._refuse(str(error))
            timer = asyncio.get_running_loop().call_later(delay, self._changed.set)
            await self._changed.wait()
            timer.cancel()

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            if why:
                _log.warning("%s", why)
            self._refused = why
            self._report(PlacesRefused(why))

    async def _end(self) -> None:
        at_once = any(self._to_end.values())
        due = [place_id for place_id, now in self._to_end.items() if now == at_once]
        await self._provider.end(due, at_once=at_once)
        for place_id in due:
            if self._to_end[place_id] == at_once:  # nobody has become impatient meanwhile
                del self._to_end[place_id]

    async def _ask(self) -> None:
        """For one more; what is not answered is still missing."""
        self._unsure = True
        try:
            place_id = await self._provider.ask(self._avoid)
        except Exception as error:
            self._unsure = isinstance(error, UnreachableError)
            raise
        finally:
            self._seen.set()
        self._unsure = False
        self._change(Place(place_id, reason="it was asked for"))
        self._drop_surplus()

    def _see(self, listing: Mapping[str, Place | PlaceLost]) -> None:
        for place_id in {**self._places, **listing}:
            match listing.get(place_id, PlaceLost(place_id, ExitCause.NODE_LOST, -9, FORGOTTEN)):
                case PlaceLost() as end if place_id in self._places:
                    del self._places[place_id]
                    self._to_end.pop(place_id, None)
                    as_told = self._given_back.pop(place_id, None) is not None
                    self._report(PlaceLost(place_id, ExitCause.KILLED, -9, "as told") if as_told else end)
                case Place() as place if place != self._places.get(place_id):  # it may have come without an answer
                    self._change(place)
        self._drop_surplus()
        self._unsure = False
        self._seen.set()

    def _change(self, place: Place) -> None:
        self._places[place.id] = place
        self._report(PlaceChanged(place))

    def _wanted(self) -> list[Place]:
        live = (PlaceState.WAITING, PlaceState.READY)
        return [each for each in self._places.values() if each.state in live and each.id not in self._given_back]

    def _drop_surplus(self) -> None:
        wanted = self._wanted()
        surplus = len(wanted) - self._most
        waiting = [each for each in wanted[::-1] if each.state is PlaceState.WAITING]
        for place in waiting[: max(0, surplus)]:
            self.give_back(place.id, at_once=True)


# Slurm's programs: how they are called, and what their answers mean. Masters wait with `ask`, commands with `run`.


ANSWER_SECONDS = 60.0
# So long before its time limit a batch job is told to end, as one is that is preempted.
NOTICE_SECONDS = 120
# For an answer to a batch job that was told to end, and will be killed.
TOLD_SECONDS = 10.0
# Slurm's controller is away or busy, or takes no more jobs of this user at present. Whatever else it says is said of the request.
_AWAY = re.compile(r"timed out|unable to contact|connect|zero bytes|try again|temporarily|busy|policy", re.IGNORECASE)


class UnknownJobError(UserError):
    """Slurm does not know this batch job, or not any more."""


_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDING = ("COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED")
_STATES = {
    **dict.fromkeys(_WAITING, PlaceState.WAITING),
    "RUNNING": PlaceState.READY,
    **dict.fromkeys(_ENDING, PlaceState.ENDING),
}


def state_of(state: str) -> PlaceState:
    """Of a batch job, where it is in its life, by Slurm's own word; an empty one is that of a job that Slurm has forgotten."""
    return _STATES.get(state, PlaceState.LOST)


def run(*words: str, within: float = ANSWER_SECONDS) -> str:
    """What one of Slurm's programs prints.

    Raises:
        UserError: Slurm refuses the request, or is not on this machine.
        UnreachableError: Slurm does not answer, or can't do it now.
    """
    program = words[0]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"Slurm does not answer: {program} took more than {within:g} s") from None
    except OSError as error:
        raise UserError(f"can't run {program}: {error.strerror}; is this a machine of a Slurm cluster?") from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    lines = done.stderr.decode(errors="replace").splitlines()
    why = "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in lines if line.strip())
    if "nvalid job id" in why:
        raise UnknownJobError(f"Slurm refuses {program}: {why}")
    if _AWAY.search(why):
        raise UnreachableError(f"Slurm does not answer: {program}: {why}")
    raise UserError(f"Slurm refuses {program}: {why}")


async def ask(*words: str, within: float = ANSWER_SECONDS) -> str:
    """As `run`, on an event loop."""
    return await asyncio.to_thread(run, *words, within=within)


def sbatch(name: str, output: str, arguments: Sequence[str], script: str) -> list[str]:
    """The call that submits a batch job, which is warned before its time limit; `number_of` reads the answer.

    Args:
        name: Of the batch job.
        output: A file for what it prints, in which Slurm replaces ``%j`` by the batch job's number.
        arguments: More of them; they come last, so they win.
        script: What a shell runs in the batch job.
    """
    about = [f"--job-name={name}", f"--output={output}", "--ntasks=1", f"--signal=B:TERM@{NOTICE_SECONDS}"]
    return ["sbatch", "--parsable", *about, *arguments, f"--wrap={script}"]


def number_of(answer: str) -> str:
    """Of the batch job that was submitted."""
    return answer.strip().partition(";")[0]


def workers_name(job: str, master: str) -> str:
    """Of all batch jobs with workers of one job; ``master``: the number of its master's, as another job may have the same name elsewhere."""
    return f"elasticdl-{job}-{master}-worker"


async def runs_again(number: str, restarts: int) -> bool:
    """Of a batch job that was told to end: whether Slurm starts it once more. If its time limit is near, that is asked for.

    Args:
        restarts: How often it had been started again when it began.
    """
    try:
        told = await ask("scontrol", "--oneliner", "show", "job", number, within=TOLD_SECONDS)
        if not re.search(r"JobState=(COMPLETING|CANCELLED)", told):
            await ask("scontrol", "requeue", number, within=TOLD_SECONDS)
            return True
    except UserError:
        return False
    except UnreachableError:  # the next master would be none too many
        return True
    counted = re.search(r"Restarts=(\d+)", told)
    return counted is None or int(counted[1]) > restarts


_FIELDS = 4  # of a line of `squeue`
_ENDS = {
    "PREEMPTED": (ExitCause.PREEMPTED, -9, "preempted by a job of higher priority"),
    "TIMEOUT": (ExitCause.EVICTED, -9, "its time limit is over"),
    "DEADLINE": (ExitCause.EVICTED, -9, "its deadline is over"),
    "NODE_FAIL": (ExitCause.NODE_LOST, -9, "its node has failed"),
    "BOOT_FAIL": (ExitCause.NODE_LOST, -9, "its node could not be started"),
    "OUT_OF_MEMORY": (ExitCause.OUT_OF_MEMORY, -9, "it took more memory than it may"),
    "CANCELLED": (ExitCause.DELETED, -9, "somebody has cancelled it"),
    "COMPLETED": (ExitCause.CLEAN, 0, "exit code 0"),
    "FAILED": (ExitCause.CRASHED, 1, "its agent has failed"),
}
# What only the batch job knows: the place's id, its node, and how many processors it has.
_VARIABLES = f"export {PLACE}=$SLURM_JOB_ID {NODE}=$SLURMD_NODENAME OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_ON_NODE:-1}}}}"
_NOT_SEEN = "Slurm has not looked at it yet"


@dataclass(frozen=True, slots=True)
class SlurmProvider:
    """A place's id is the number of its batch job.

    Args:
        name: Of all its batch jobs; no other job of this user has it.
        command: The agent's.
        output: A file for what the agent and its workers print, in which Slurm replaces ``%j`` by the batch job's number.
        arguments: The user's for ``sbatch`` (``--slurm_args``); they come last, so they win.
    """

    name: str
    command: Sequence[str]
    output: str
    arguments: Sequence[str] = ()

    async def list(self) -> Mapping[str, Place | PlaceLost]:
        query = [f"--name={self.name}", "--states=all", "--format=%i|%T|%N|%r"]
        try:
            lines = (await ask("squeue", "--noheader", "--me", *query)).splitlines()
        except UserError as error:  # nothing is wrong with the request: whatever it says will pass
            raise UnreachableError(str(error)) from None
        return {line.partition("|")[0]: _read(line) for line in lines if line.count("|") >= _FIELDS - 1}

    async def ask(self, avoid: AbstractSet[str]) -> str:
        elsewhere = [f"--exclude={','.join(sorted(avoid))}"] if avoid else []
        script = f"{_VARIABLES}; exec {shlex.join(self.command)}"
        words = sbatch(self.name, self.output, ["--no-requeue", *elsewhere, *self.arguments], script)
        return number_of(await ask(*words))

    async def end(self, place_ids: Sequence[str], *, at_once: bool) -> None:
        try:
            if at_once:  # a signal is for what runs: of a job that waits nothing would come of it
                await ask("scancel", "--quiet", "--signal=KILL", "--full", "--state=RUNNING", *place_ids)
            await ask("scancel", "--quiet", *place_ids)
        except UserError as error:  # whatever it says will pass
            raise UnreachableError(str(error)) from None


def _read(line: str) -> Place | PlaceLost:
    """A line of ``squeue``."""
    number, state, node, reason = line.split("|", _FIELDS - 1)
    place = Place(number, node, state_of(state))
    match place.state:
        case PlaceState.WAITING:
            why = reason.strip("()")
            return replace(place, reason=f"Slurm has no place for it yet: {why}" if why != "None" else _NOT_SEEN)
        case PlaceState.ENDING:
            return replace(place, reason=f"Slurm: {state.lower()}")
        case PlaceState.LOST:
            return PlaceLost(number, *_ENDS.get(state, (ExitCause.KILLED, -9, f"Slurm calls it {state}")))
    return place
