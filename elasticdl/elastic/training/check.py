"""Whether all members of a world make the same step, of the same samples and from the same state: one ballot a step, and one judgement of it.

*Samples.* The ballot has a checksum of the batch's samples, and in the first step of each world and of each epoch one of what the data hold.
*State.* Before the first step of each world and of each epoch every member makes a checksum of its pieces, and before all others one
of the optimizer's settings. Only if the votes are not equal are the pieces compared, before the parameters change: first by name, then how
far those that differ are apart. Processors of different kinds round differently, so up to `ROUNDING` everybody takes rank 0's model.
Of what does not make the model, such as the user's values, a warning tells once.

*The judgement.* Who has never made a step and alone differs is refused alone. Else the job ends with a line that names what differs.
"""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import Progress, StepPlan
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.training_step import BatchFacts, Disagreement, Position, Vote, newcomers_alone
from elasticdl.elastic.training.data_facts import DataFacts
from elasticdl.elastic.training.job import JobContext
from elasticdl.elastic.training.pieces import (
    SETTINGS,
    Piece,
    Settings,
    Survey,
    Tensors,
    distance,
    named_leaves,
    plain_mark,
    shown,
    survey_of,
)
from elasticdl.job.spec import CHECK_OFF, CHECK_REPAIR

# Part of the largest value of a piece by which it may differ for no other reason than other processors.
ROUNDING = 1e-3
MOST_NAMED = 3  # of what differs, in a line
# What is likely, by how the name of a piece begins; the first that fits.
LIKELY: tuple[tuple[str | tuple[str, ...], str], ...] = (
    ("scheduler", "does it step on one worker only, or by a number of one worker's part of the data?"),
    (
        SETTINGS,
        "is it set on one worker only, as by a hook, a scheduler's step or a callback, one derived from Keras's ModelCheckpoint for "
        "example, which is called on rank 0?",
    ),
    ("scaler", "is it updated on one worker only?"),
    ("random", "is something drawn on one worker only, as where the rank is 0?"),
    (
        "",
        "is something set or loaded on one worker only, or drawn on each for itself, as in a callback, a hook or a layer?",
    ),
)
LIKELY_VALUE = "is it computed from one worker's part of the data, by its own clock or from its own files?"
OF_ONE_WORKER = (
    "the processes of a worker were given different batches, and each takes its part of one batch: draw alike in all of them, from one seed, and "
    "from the same data; torch.utils.data.DistributedSampler is not needed"
)
# How much of a piece's name says what is told once; of others the first part, as of the user's values.
GROUPS = {"callbacks": 3, "random": 2, "trainer": 2}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a piece, between rank 0's worker and another. ``distance``: part of rank 0's largest value; infinite for what is no
    number, or of another shape. ``root``, ``mine``: the two values as text, if they are short."""

    piece: str
    worker: int
    distance: float
    root: str = ""
    mine: str = ""

    def told(self, first: int) -> str:
        """``first``: rank 0's worker."""
        if self.root and self.mine and self.root != self.mine:
            return f"{self.piece} is {self.root} on worker {first} and {self.mine} on worker {self.worker}"
        by = f" by {self.distance:.2g} of its largest value" if np.isfinite(self.distance) else ""
        return f"{self.piece} differs{by}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a comparison has found, on all members alike."""

    first: int = 0  # rank 0's worker
    who: str = ""  # holds another model than whom
    model: tuple[Difference, ...] = ()  # what is the cause rather than what has come of it is first
    others: tuple[Difference, ...] = ()
    refused: tuple[int, ...] = ()  # workers that came later, who alone hold another model

    @property
    def is_rounding(self) -> bool:
        return all(each.distance <= ROUNDING for each in self.model)


class Checked(Protocol):
    """A training state."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def settings(self) -> Settings: ...

    def take_over(self) -> None:
        """On all members, be at rank 0's model."""


class Check:
    """Of one training state; on all members at the same steps."""

    def __init__(
        self,
        job: JobContext,
        state: Checked,
        tensors: Tensors,
        position: Callable[[], Position],
        facts: Callable[[], DataFacts],
    ) -> None:
        how = job.check_state
        self._each = int(how) if how.isdigit() else 0
        self._is_on = how != CHECK_OFF
        self._always_repairs = how == CHECK_REPAIR
        self._worker_id = job.worker_id
        self._collective = job.collective
        self._tell = job.warn  # for the journal
        self._state = state
        self._tensors = tensors
        self._position = position
        self._facts = facts
        self._place = (-1, -1)  # world and epoch in whose first step the data are compared, however often it is made
        self._first = -1  # that step
        self._sources = 0  # checksum of the data in that step
        self._seen = (-1, -1)  # world and epoch, or number of steps, of the last comparison of the state
        self._step = -1  # after which the members vote
        self._survey: Survey | None = None  # before the step in hand, if all is compared in it
        self._last: Survey | None = None  # after a step that may be the last
        self._settings: Mapping[str, Any] = {}  # as they were when this member voted
        self._same = self._same_settings = -1  # step after which all was the same, and the settings
        self._takes_over = False  # once the step is made
        self._told: set[str] = set()
        self.workers = 0  # of whom the last vote has shown that all is the same; 0 if not all was compared

    # -- a step --

    def begin(self, progress: Progress) -> None:
        """A step begins: nothing of the state has been touched."""
        place = (self._collective.world.version, progress.step // self._each if self._each else progress.epoch)
        self._step, self._last = progress.step, None
        if self._survey is not None and place == self._seen:
            return  # the step begins once more
        self._survey = None
        if self._compares and place != self._seen:
            self._seen = place
            self._survey = survey_of(self._state.pieces, self._tensors, progress.step)

    def ballot(self, plan: StepPlan | None) -> tuple[int, int]:
        """For the vote of the step of this plan: checksums of batch and state. 0 where there is no plan, or nothing is compared."""
        if self._collective.world.size == 1 and self._collective.inside.size == 1:
            return 0, 0
        return self._of_batch(plan) if plan is not None else 0, self._of_state() if self._compares else 0

    def _of_batch(self, plan: StepPlan) -> int:
        place = self._collective.world.version, plan.epoch
        if place != self._place:
            self._place, self._first = place, plan.step
            self._sources = zlib.crc32(repr(self._facts().now().sources).encode())
        return plan.checksum ^ self._sources if plan.step == self._first else plan.checksum

    def _of_state(self) -> int:
        self._settings = self._state.settings.told()
        checksum = zlib.crc32(repr(self._settings).encode())
        return checksum if self._survey is None else checksum ^ self._survey.checksum()

    def judge(self, vote: Vote) -> Vote:
        """All members have voted on the same step. Returns the vote; of data that differ by rounding alone it says that they are the same.

        Raises:
            UserError: batches, data or states differ, or this worker is refused.
            WorldBroken: another worker is.
        """
        self.workers = 0
        if vote.ended:
            self.judge_end(vote, "goes on")
            return vote
        if not vote.one_batch:
            self._judge_batches()
        survey, self._survey = self._survey, None
        if self._compares:
            self._judge_states(survey, one_state=vote.one_state)
        return vote if vote.one_batch else replace(vote, one_batch=True)

    def judge_end(self, vote: Vote, mine: str) -> None:
        """Some members make this step and others none; all come here. It returns where nobody is refused.

        Raises:
            UserError: this worker is refused.
            WorldBroken: another worker is.
        """
        position = self._position()
        position.voted(vote)
        self._differ(mine, position.disagreement(self._collective.world.size))

    def require_one(self, mine: str, line: str) -> None:
        """See `require_one`."""
        if self._differ(mine, line):
            raise UserError(line)

    def step_made(self) -> None:
        """All members come here after the same step."""
        if not self._takes_over:
            return
        self._takes_over = False
        try:
            self._state.take_over()
        except WorldBroken as failure:
            log.info("rank 0's state was not taken over: %s", failure)

    # -- the end --

    def last_step_made(self, step: int) -> None:
        """There may be no further step: what is compared at the end is as it is now."""
        self._last = survey_of(self._state.pieces, self._tensors, step, others=False) if self._compares else None

    def last_ballot(self, step: int) -> int:
        """For the vote by which training ends after this step."""
        self._step = step
        if self._last is None or self._last.step != step:
            self._last = None
            return 0
        return self._last.checksum()

    def ended(self, *, one_state: bool) -> None:
        """All members have voted that training is over. To fail now would help nobody."""
        if one_state or not self._compares:
            return
        try:
            found = self._compare(self._last, {})
        except WorldBroken as failure:  # what was voted holds
            log.info("the states were not compared: %s", failure)
            return
        if found.model and not found.is_rounding:
            what = f"training has ended after step {self._step}, and {self._line(found)}"
            self._tell_once("", text=f"{what} What is written is the model of one worker")

    # -- details --

    @property
    def _compares(self) -> bool:
        return self._is_on and self._collective.world.size > 1

    @property
    def _has_trained(self) -> bool:
        """This worker has made a step."""
        return self._position().made > 0

    def _differ(self, mine: str, line: str) -> bool:
        return differ(self._collective, self._worker_id, mine, line, trained=self._has_trained)

    def _judge_batches(self) -> None:
        """The samples, or the data, are not the same; by rounding they may differ."""
        facts, position = self._facts().now(), self._position()
        plan, at = position.batch, position.progress
        epoch, step, samples = (plan.epoch, plan.step, plan.whole) if plan else (at.epoch, at.step + 1, ())
        batch = BatchFacts.of(self._worker_id, epoch, step, samples, trained=self._has_trained)

        def judged(every: Sequence[tuple[BatchFacts, DataFacts]]) -> Disagreement:
            data = [theirs.differs(every[0][1]) for _, theirs in every]
            return Disagreement.of([batch for batch, _ in every], data)

        found = _of_all(self._collective, (batch, facts), judged)
        found.refuse(self._worker_id)
        if found.line:
            raise UserError(found.line)
        if self._collective.inside.size > 1:
            raise UserError(OF_ONE_WORKER)

    def _judge_states(self, survey: Survey | None, *, one_state: bool) -> None:
        if not one_state:
            try:
                found = self._compare(survey, named_leaves(self._settings))
            except WorldBroken as failure:  # the next step finds that as well, where it can be mended
                log.info("the states were not compared: %s", failure)
                return
            self._judge(found)
        self._same_settings = self._step
        if survey is not None:
            self._same = self._step
            self.workers = self._collective.world.size

    def _judge(self, found: Found) -> None:
        repairs = bool(found.model) and (self._always_repairs or found.is_rounding)
        self._takes_over = self._agree_inside(found, repairs=repairs)
        if repairs:
            what = found.model[0].told(found.first)
            self._tell_once(
                "",
                text=f"after step {self._step} the workers' states were not the same, {what}: all have taken rank 0's",
            )
        elif found.model:
            line = (
                f"after step {self._step} {self._line(found)} What all workers hold must be computed alike on all "
                "(docs/reliability.md)"
            )
            Disagreement(line, found.refused).refuse(self._worker_id)
            raise UserError(line)
        fresh = {_group(each.piece): each for each in found.others if _group(each.piece) not in self._told}
        if fresh:
            likely = _likely(next(iter(fresh.values())).piece, LIKELY_VALUE)
            named = [each.told(found.first) for each in list(fresh.values())[:MOST_NAMED]]
            more = list(fresh)[MOST_NAMED:]
            self._tell_once(
                *fresh,
                text=f"after step {self._step} {'; '.join(named)}{f'; and {len(more)} more' if more else ''}: {likely} "
                f"Workers that join take worker {found.first}'s (docs/reliability.md)",
            )

    def _agree_inside(self, found: Found, *, repairs: bool) -> bool:
        """Have this process go the way of the others of its worker, each of which has found what it has of its part of the model. Returns whether
        all take rank 0's.

        Raises:
            UserError, WorldBroken: this process has found nothing amiss, and another one has.
        """
        differs = bool(found.model) and not repairs
        mine = (differs, repairs, differs and bool(found.refused), differs and self._worker_id in found.refused)
        some_differ, some_repair, refuses, is_refused = self._collective.inside.sum([*map(float, mine)])
        if some_differ and not differs:
            if refuses and not is_refused:
                raise WorldBroken("a worker is refused, which holds another state")
            raise UserError("another process of this worker holds another state than its equals in the other workers")
        return bool(some_repair and not some_differ)

    def _tell_once(self, *what: str, text: str) -> None:
        if not self._told.issuperset(what) and self._collective.world.rank == 0:
            self._tell(text)
        self._told.update(what)

    def _line(self, found: Found) -> str:
        pieces = list(dict.fromkeys(each.piece for each in found.model))
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        same = self._same_settings if pieces[0].startswith(SETTINGS) else self._same
        since = f"after step {same} they were the same" if same >= 0 else "they were not compared before"
        return f"{found.who}: {found.model[0].told(found.first)}{more}; {since}: {_likely(pieces[0])}"

    def _compare(self, survey: Survey | None, settings: Mapping[str, Any]) -> Found:
        """Who has nothing to compare takes part, and nothing is held against it."""
        model = {**(survey.model if survey else {}), **settings}
        others = survey.others if survey else {}
        marks = {**(survey.marks() if survey else {}), **{name: plain_mark(each) for name, each in settings.items()}}
        mine = [{name: marks[name] for name in each} for each in (model, others)]
        held: list[Any] = []  # on rank 0, by all

        def named(every: Sequence[Any]) -> list[list[str]]:
            held.extend(every)
            return [_differing([each[kind] for each in every]) for kind in (1, 2)]

        which = _of_all(self._collective, (self._worker_id, *mine), named)
        apart = [(name, self._distance(name, model), _text(name, model)) for name in which[0]]
        texts = [(name, float("inf"), _text(name, others)) for name in which[1]]
        told = (self._has_trained, *([apart, texts] if model else [[], []]))
        found: Found = _of_all(self._collective, told, lambda differences: _found(held, differences))
        return found

    def _distance(self, name: str, held: Mapping[str, Any]) -> float:
        array = self._tensors.host_array(held[name]) if name in held else None
        return distance(_of_all(self._collective, array, lambda every: every[0]), array)


def _differing(marks: Sequence[Mapping[str, int]]) -> list[str]:
    """Pieces of which a member that has any has others than rank 0."""
    root, *others = marks
    held = [each for each in others if each]
    return sorted(
        {name for each in held for name in {*root, *each} if root.get(name) != each.get(name)} if root else ()
    )


def _found(every: Sequence[Any], told: Sequence[Any]) -> Found:
    """``every``: of each member the worker and its marks, of model and others. ``told``: of each member whether it has trained, and of
    those that differ how far it is from rank 0's, and as text."""
    first, *roots = every[0]
    found: tuple[list[Difference], list[Difference]] = ([], [])
    for (worker, *marks), (_, *pieces) in zip(every, told, strict=True):
        for kind in (0, 1):
            for (name, by, text), (*_, roots_text) in zip(pieces[kind], told[0][1 + kind], strict=False):
                if by and roots[kind].get(name) != marks[kind].get(name):
                    found[kind].append(Difference(name, worker, by, roots_text, text))
    model = sorted(found[0], key=lambda each: (_order(each.piece), -each.distance))
    members = [(worker, trained) for (worker, *_), (trained, *_) in zip(every, told, strict=True)]
    refused = newcomers_alone(members, {each.worker for each in model})
    return Found(first, _who(model[0].piece, every) if model else "", tuple(model), tuple(found[1]), refused)


def _order(piece: str) -> int:
    """What is the cause of others is first."""
    return next(number for number, (name, _) in enumerate(LIKELY) if piece.startswith(name))


def _who(piece: str, every: Sequence[Any]) -> str:
    """Who holds another piece than whom."""
    holders: dict[int | None, list[int]] = {}
    for worker, marks, _ in every:
        if marks:
            holders.setdefault(marks.get(piece), []).append(worker)
    groups = sorted(holders.values(), key=len)
    if len(groups[0]) == len(groups[-1]):
        return f"worker {groups[0][0]} and worker {groups[1][0]} hold different states"
    return f"worker {groups[0][0]} holds another state than {_workers(groups[-1])}"


def _workers(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"worker {ids[0]}"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}" if len(ids) < 6 else f"{len(ids)} others"


def _text(name: str, held: Mapping[str, Any]) -> str:
    return shown(held[name]) if name in held else "not there"


def _likely(piece: str, otherwise: str = "") -> str:
    found = next(text for name, text in LIKELY if piece.startswith(name))
    return otherwise if otherwise and found == LIKELY[-1][1] else found


def _group(piece: str) -> str:
    parts = piece.split(".")
    return ".".join(parts[: GROUPS.get(parts[0], 1)])


# -- what all members tell --


def require_one(collective: Collective, worker: int, mine: str, line: str, *, trained: bool) -> None:
    """As `differ`; who is not refused does not go on either if it differs.

    Raises:
        UserError: it differs.
        WorldBroken: another worker is refused.
    """
    if differ(collective, worker, mine, line, trained=trained):
        raise UserError(line)


def differ(collective: Collective, worker: int, mine: str, line: str, *, trained: bool) -> bool:
    """Whether members differ, where nobody is refused. All come here with what has to be the same.

    ``line``: what is to be said of who is refused. ``trained``: this worker has made a step of the job before.

    Raises:
        UserError: this worker is refused, as it came later and has another than the rest.
        WorldBroken: another worker is.
    """

    def judged(every: Sequence[tuple[int, bool, str]]) -> tuple[bool, tuple[int, ...]]:
        others = {number for number, _, text in every if text != every[0][2]}
        return bool(others), newcomers_alone([each[:2] for each in every], others)

    is_other, refused = _of_all(collective, (worker, trained, mine), judged)
    Disagreement(line, refused).refuse(worker)
    return bool(is_other)


def _of_all(collective: Collective, mine: Any, judged: Callable[[Sequence[Any]], Any]) -> Any:
    """What rank 0 makes of what all members tell, by rank; on all of them."""
    told = collective.gather(np.frombuffer(bytearray(pickle.dumps(mine)), np.uint8), "elasticdl.told")
    made = judged([pickle.loads(each.tobytes()) for each in told]) if told else None
    return pickle.loads(collective.broadcast_bytes(pickle.dumps(made), "elasticdl.judged"))
