"""How jobs of one queue share a cluster, without anybody above them.

Each job publishes a claim: the places that it holds, and what each further worker would bring it. Each reads the claims of the
others and works out the same division of the places that are known, so each knows its own share, and whom its last worker
would help more. One job at a time has one worker more than there is a known place for: it waits in the cluster's own queue
for the next place that becomes free.

A division begins with the fewest workers of each job. Then each place goes to the job that it brings most: the speedup that it
adds, over the square root of the work that is left. Speedups alone would be AdaptDL's measure, work alone that of the shortest
remaining time first; between the two lies what is best for the mean completion time (Berg et al., heSRPT, 2020).

The other job can't always take a place that was given up for it: its workers may need another kind of node, or it never gets
enough places. So a job that waits in vain is skipped after a while, and costs the others no places.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from elasticdl.master.state.claim import SKIPPED_AFTER, Claim
from elasticdl.master.state.speedup import Curve

# Until it is measured, a job is taken to scale as N^0.8.
PRIOR_EXPONENT = 0.8
# A neighbour must gain by so much more from a place than the job that has it, as every change costs both something.
STICKINESS = 1.2
# While a place moves between two jobs, neither of them counts it, or both do. So the number seen most often in so long counts.
MEMORY_SECONDS = 20.0
# If no worker has waited for CALM_SECONDS, the cluster may have more places: jobs ask for as many again as they know of, and at
# least for LEAST_PROBE.
LEAST_PROBE = 4
CALM_SECONDS = 10.0
# A job that has not seen the others yet asks for no more than its fewest, or than it has. Where claims can't be read, only for so long.
UNSEEN_SECONDS = 10.0
UNSEEN = "asks for no more until it has seen the other jobs of its queue"


def gains_of(curve: Curve, most: int) -> tuple[float, ...]:
    """What each of ``most`` workers adds, the first of them 1; none adds more than the one before it.

    Where the next adds less than those after it, as where only an eighth worker makes the largest part of the batch smaller, each
    of them counts for the mean of all: who divides places one by one would stop there. Nor has a curve of large numbers all points.
    """
    levels = {point.workers: point.speedup for point in curve}
    if len(levels) < 2:
        return tuple(round(n**PRIOR_EXPONENT - (n - 1) ** PRIOR_EXPONENT, 4) for n in range(1, most + 1))
    last = min((workers for workers in levels if workers >= most), default=max(levels))
    gains = [levels[1]]
    while (here := len(gains)) < last:
        further = (more for more in levels if here < more <= last)
        _, there = max(((levels[more] - levels[here]) / (more - here), more) for more in further)
        gains += [(levels[there] - levels[here]) / (there - here)] * (there - here)
    return tuple(round(gain, 4) for gain in (*gains[:most], *[0.0] * (most - len(gains))))


def divide(claims: Iterable[Claim], places: int, probes: int = 0) -> dict[str, int]:
    """Of each job, the workers that it is to have. One for whose fewest there is no room waits, and takes no place.

    ``probes``: so many are asked for beyond the places that are known; not by a job that has a place to give up first. Pure, and
    the same whoever calls it: ties go by name.
    """
    division = _Division(claims, places)
    division.give_fewest()
    division.give_places()
    division.ask_beyond(probes)
    return division.shares


class _Division:
    def __init__(self, claims: Iterable[Claim], places: int) -> None:
        self.shares: dict[str, int] = {}
        self._claims = sorted(
            claims,
            key=lambda claim: (not claim.runs, claim.held == 0, claim.left if claim.left >= 0 else math.inf, claim.job),
        )
        known = [claim.left for claim in self._claims if claim.left >= 0]
        self._usual = statistics.median(known) if known else 1.0
        self._places = places  # that nobody has yet
        # For the next worker of each job that may have one: what it brings, negative, as the best comes first.
        self._candidates: list[tuple[float, str, Claim]] = []

    def give_fewest(self) -> None:
        awaited = False  # somebody is to have its fewest, and has not got them yet
        for claim in self._claims:
            self.shares[claim.job] = claim.minimum
            if claim.runs or (claim.hopes and claim.minimum <= self._places):
                taken, awaited = claim.minimum, awaited or not claim.runs
                # A job that waited in vain gets no more than its fewest until it runs.
                if claim.runs or claim.waited < SKIPPED_AFTER:
                    self._offer(claim)
            elif claim.held <= self._places and not awaited:
                taken = claim.held
            else:  # of two that have a part of their fewest each, none would ever run
                taken = self.shares[claim.job] = min(claim.held, self._places)
            self._places = max(0, self._places - taken)

    def give_places(self) -> None:
        """Each to the job that it brings most; one that waits in vain has no more than it holds."""
        passed: list[tuple[float, str, Claim]] = []
        while self._places and self._candidates:
            best = _, job, claim = heapq.heappop(self._candidates)
            if claim.vain and self.shares[job] >= claim.held:
                passed.append(best)
                continue
            self.shares[job] += 1
            self._places -= 1
            self._offer(claim)
        self._candidates += passed

    def ask_beyond(self, probes: int) -> None:
        self._candidates = [each for each in self._candidates if self.shares[each[1]] >= each[2].held]
        heapq.heapify(self._candidates)
        while probes and self._candidates:
            _, job, claim = heapq.heappop(self._candidates)
            self.shares[job] += 1
            if claim.waited < SKIPPED_AFTER:  # else it goes on waiting, and it is another's turn, too
                probes -= 1
                self._offer(claim)

    def _offer(self, claim: Claim) -> None:
        """Its next worker may have a place."""
        number = self.shares[claim.job] + 1
        if number > claim.wanted or (number > claim.held and claim.is_over_soon) or claim.gain(number) <= 0:
            return
        sticks = STICKINESS if number <= claim.held else 1.0
        heapq.heappush(self._candidates, (-sticks * claim.worth(number, self._usual), claim.job, claim))


class Sharing:
    """One job's view of its queue. Times are passed in, seconds."""

    def __init__(self) -> None:
        self.share: int | None = None  # workers that this job is to have; None: it has not seen the others yet
        self.reason = UNSEEN
        self._until: float | None = (
            None  # when it no longer waits for a first look at the others; None: it has not begun to wait
        )
        self._waits = True
        self.yields = False  # the share is less than its fewest, for others to have theirs
        self._held: deque[tuple[float, int]] = deque()  # places that were known lately, and when
        self._places = 0  # as of the last look
        self._crowded_at = -math.inf
        self._seen = 0  # the share as of the last look, which another look has to confirm

    def see(self, own: Claim, others: Sequence[Claim], now: float) -> bool:
        """What the queue looks like; whether the share is another now."""
        claims = [own, *(claim for claim in others if claim.job != own.job)]
        self._held.append((now, sum(claim.held for claim in claims)))
        while now - self._held[0][0] > MEMORY_SECONDS:
            self._held.popleft()
        counts = Counter(held for _, held in self._held)
        places = max(counts, key=lambda held: (counts[held], held))
        if any(claim.hopes for claim in claims):  # what was given up for it is still there
            places = max(places, self._places)
        if any(claim.waiting for claim in claims):
            self._crowded_at = now
        calm = now - self._crowded_at >= CALM_SECONDS
        if calm:  # no job gives up places for others now, so more places are new ones, and count at once
            places = max(places, self._held[-1][1])
        self._places = places
        probe = max(LEAST_PROBE, places) if calm else 1
        shares = divide(claims, places, probe)
        before, share = self.share, shares[own.job]
        agrees = before is None or (share - before) * (self._seen - before) > 0  # with what was seen the last time
        self._seen = share
        if share != before and not agrees:
            return False
        self.share, self.yields = share, share < own.minimum
        self.reason = self._explain(own, claims, shares, places)  # another one may be why it is what it was
        return share != before

    def wait(self, now: float) -> None:
        """Called with each tick: after UNSEEN_SECONDS it no longer waits for a first look at the others."""
        if self._until is None:
            self._until = now + UNSEEN_SECONDS
        self._waits = now < self._until

    def bound(self, most: int, minimum: int, reason: str, there: int = 0) -> tuple[int, str]:
        """The most workers of this job, and why no more, if without its neighbours it would be ``most``.

        ``there``: how many it has. Before it has seen the others it must not ask for more: they would take the workers
        that it launches, and lets go again at the first look, for places, and give up some of theirs.
        """
        if self.share is None:
            held = max(minimum, there)
            return (held, self.reason) if self._waits and held < most else (most, reason)
        if self.share >= most:
            return most, reason
        return self.share if self.yields else max(minimum, self.share), self.reason

    def _explain(self, own: Claim, claims: Sequence[Claim], shares: Mapping[str, int], places: int) -> str:
        said = f"{shares[own.job]} of {places} places that the jobs of its queue have"
        if shares[own.job] < own.minimum:
            return f"{said}, less than its fewest, which are {own.minimum}: others have theirs first"
        if shares[own.job] >= own.wanted:
            return said
        if own.gain(shares[own.job] + 1) <= 0:
            return f"{said}: a further one would bring nothing"
        others = [claim for claim in claims if claim is not own and shares[claim.job]]
        if not others:
            return said
        last = min(others, key=lambda claim: (claim.worth(shares[claim.job]), claim.job))
        further = f"a further one would bring {own.describe(shares[own.job] + 1)}"
        return f"{said}: {further}; the last of {last.job} brings {last.describe(shares[last.job])}"
