"""How jobs of one queue divide a cluster among themselves, each for itself."""

import asyncio
import math
import random
import statistics
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.kube.api_error import NoAnswerError
from elasticdl.kube.manifests.names import CLAIM_ANNOTATION, JOB_LABEL
from elasticdl.master.rules.sharing import Sharing, divide, gains_of
from elasticdl.master.shell.neighbours import STALE_SECONDS, Neighbours
from elasticdl.master.state.claim import RETRIED_EVERY, SKIPPED_AFTER, Claim
from elasticdl.master.state.speedup import Curve, Point

GOOD = tuple(0.98**n for n in range(8))
FAIR = tuple(0.8**n for n in range(8))
POOR = (1.0, 0.3, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0)
START_SECONDS = 6.0  # from a worker's place to its first step


def claim(job, held=1, waiting=0, minimum=1, wanted=8, left=1000.0, gains=GOOD, waited=0.0):
    return Claim(job, held, waiting, minimum, wanted, left, gains, waited)


def curve(gains):
    points, total = [], 0.0
    for number, gain in enumerate(gains, 1):
        total += gain
        points.append(Point(number, total, total, total, gain, gain, gain))
    return Curve(tuple(points))


def kept(waited):
    """A newcomer that waits in vain is skipped, and tried again now and then."""
    return [claim("a", held=8, gains=FAIR), claim("b", held=0, waiting=1, waited=waited, gains=FAIR)]


@pytest.mark.parametrize(
    ("claims", "places", "probes", "shares"),
    [
        ([claim("a"), claim("b", gains=POOR)], 8, 0, {"a": 7, "b": 1}),  # to those that they bring most
        ([claim("a", wanted=3), claim("b", gains=POOR)], 100, 0, {"a": 3, "b": 4}),  # no more than is of use
        ([claim("a", held=8), claim("b", held=0, minimum=2, gains=POOR)], 8, 0, {"a": 6, "b": 2}),  # the fewest first
        # Without room for the fewest of all, those that run stay; c goes on asking.
        ([claim("a", 3, 0, 3), claim("b", 3, 0, 3), claim("c", 0, 0, 3)], 8, 0, {"a": 4, "b": 4, "c": 3}),
        # Of two that have a part of their fewest one gives it back, else neither would ever train; then it asks again.
        ([claim("c", held=2, minimum=5), claim("d", held=3, minimum=5)], 5, 0, {"c": 5, "d": 0}),
        ([claim("c", held=5, minimum=5), claim("d", held=0, minimum=5)], 5, 0, {"c": 5, "d": 5}),
        # What is idle harms nobody.
        ([claim("b", held=4, minimum=3), claim("c", held=2, minimum=4, left=1.0)], 6, 0, {"b": 4, "c": 4}),
        (kept(0.0), 8, 0, {"a": 4, "b": 4}),
        (kept(SKIPPED_AFTER), 8, 0, {"a": 8, "b": 1}),
        (kept(RETRIED_EVERY - 1), 8, 0, {"a": 8, "b": 1}),
        (kept(RETRIED_EVERY), 8, 0, {"a": 7, "b": 1}),
        (kept(RETRIED_EVERY + SKIPPED_AFTER), 8, 0, {"a": 8, "b": 1}),
        # Who waits long for one more waits on, and another asks as well.
        ([claim("a", held=4, waiting=1), claim("b", held=2, gains=FAIR)], 6, 1, {"a": 5, "b": 2}),
        ([claim("a", 4, 1, waited=SKIPPED_AFTER), claim("b", 2, gains=FAIR)], 6, 1, {"a": 5, "b": 3}),
        ([claim("a", 4, 1, waited=SKIPPED_AFTER), claim("b", 2, gains=FAIR)], 7, 0, {"a": 4, "b": 3}),
        # A job that is over soon has no more: others would stop workers, and start new ones, for seconds.
        ([claim("a", held=2, left=50.0), claim("b", held=6)], 8, 1, {"a": 2, "b": 7}),
        # Who has a place keeps it for a small difference.
        ([claim("a", 4, gains=tuple(0.9 * gain for gain in GOOD)), claim("b", 4)], 8, 0, {"a": 4, "b": 4}),
    ],
)
def test_each_place_goes_to_the_job_that_it_brings_most(claims, places, probes, shares):
    assert divide(claims, places, probes=probes) == shares


def test_of_two_alike_the_shorter_has_more_and_of_one_without_an_end_the_usual_one_is_taken():
    shares = divide([claim("long", left=900.0, gains=FAIR), claim("short", left=100.0, gains=FAIR)], 8)
    assert shares["short"] > shares["long"] >= 1
    shares = divide([claim("a", left=-1.0), claim("b", left=400.0), claim("c", left=100.0)], 9)
    assert shares["c"] >= shares["a"] >= 1
    b = claim("b", held=6)
    assert divide([claim("a", held=2, left=70.0), b], 8)["a"] > 4
    assert divide([claim("a", held=0, waiting=1, left=10.0), b], 7)["a"] > 1, "one that does not run is over never"
    assert divide([claim("a", held=4, gains=tuple(gain * 0.5 for gain in GOOD)), claim("b", held=4)], 8)["b"] > 4


def test_a_neighbour_that_is_gone_is_not_shown_as_the_reason():
    sharing, own = Sharing(), claim("a", held=4, waiting=1, gains=FAIR)
    sharing.see(own, [claim("b", held=4, waiting=1, gains=FAIR)], 0.0)
    assert "the last of b brings" in sharing.reason
    assert not sharing.see(own, [claim("c", held=4, waiting=1, gains=FAIR)], 2.0)
    assert "the last of c brings" in sharing.reason


def test_a_job_whose_fewest_become_more_than_its_share_gives_it_back_too():
    others = [claim("b", wanted=1), claim("c", held=2, waiting=1, minimum=3, left=10.0)]
    sharing = Sharing()
    for fewest in (1, 5):
        sharing.see(claim("a", held=2, minimum=fewest), others, 2.0 * fewest)
        assert sharing.bound(8, fewest, "") == (1, sharing.reason)


def test_a_job_that_grows_lets_go_nothing_of_what_it_has_just_got():
    """What was seen most often in the last seconds is less than what there is by now."""
    sharing, shares = Sharing(), [1]
    for look in range(20):
        sharing.see(claim("a", held=shares[-1], wanted=64, left=1e9, gains=(1.0,) * 64), [], 2.0 * look)
        shares.append(sharing.share)
    assert shares == sorted(shares)
    assert shares[-1] == 64


@given(
    st.lists(
        st.builds(
            Claim,
            job=st.sampled_from("abcdefgh"),
            held=st.integers(0, 9),
            waiting=st.integers(0, 3),
            minimum=st.integers(1, 4),
            wanted=st.integers(4, 9),
            left=st.floats(-1, 1e6),
            gains=st.lists(st.floats(-1, 1), max_size=9).map(tuple),
            waited=st.floats(0, 2000),
        ),
        max_size=6,
        unique_by=lambda claim: claim.job,
    ),
    st.integers(0, 40),
    st.randoms(),
)
def test_a_division_is_the_same_for_all_and_no_larger_than_what_there_is(claims, places, shuffler):
    shares = divide(claims, places)
    shuffled = claims[:]
    shuffler.shuffle(shuffled)
    assert divide(shuffled, places) == shares
    assert all(0 <= shares[each.job] <= max(each.minimum, each.wanted) for each in claims)
    assert all(shares[each.job] >= each.minimum for each in claims if each.runs)
    assert sum(max(0, shares[each.job] - each.minimum) for each in claims) <= places


SPARSE = Curve(tuple(Point(n, float(n), 0, 0, 1.0, 0, 0) for n in (1, 2, 4)))
STEPS = curve((1.0, 1.0, 1.0, 1.0, 0.5, 1.2, -0.1, 1.9))  # of 24 samples the largest part is 4 for 6 and 7, 3 for 8


@pytest.mark.parametrize(
    ("given", "workers", "gains"),
    [
        (curve((1.0, 0.9, 0.5)), 5, (1.0, 0.9, 0.5, 0.0, 0.0)),  # beyond it nothing is expected
        (Curve(), 2, (1.0, pytest.approx(2**0.8 - 1, abs=1e-4))),
        (SPARSE, 4, (1.0,) * 4),
        # A worker that adds nothing is no end if the next adds much.
        (STEPS, 8, (1.0, 1.0, 1.0, 1.0, 0.875, 0.875, 0.875, 0.875)),
        (STEPS, 7, (1.0, 1.0, 1.0, 1.0, 0.85, 0.85, -0.1)),
    ],
)
def test_gains_are_those_of_the_curve(given, workers, gains):
    assert gains_of(given, workers) == gains


def test_a_claim_travels_as_text_and_nonsense_is_refused_in_one_line():
    text = claim("a").to_json()
    assert Claim.from_json(text) == claim("a")
    for wrong in ("", "{}", text.replace("1000.0", '"much"'), text.replace('"held":1', '"held":-1')):
        with pytest.raises(ValueError, match=r"^claim: ") as refusal:
            Claim.from_json(wrong)
        assert "\n" not in str(refusal.value)


# ---- a whole queue ----


class PlayedQueue:
    """Places for pods, which get them in the order of the jobs, or by ``chance``, a generator of random numbers."""

    def __init__(self, places, chance=None, **jobs):
        self.places, self.chance = places, chance
        self.jobs = jobs  # name: (arrival, work, gains)
        self.left = {name: work for name, (_, work, _) in jobs.items()}
        self.pods = {name: [] for name in jobs}  # since when each has a place, or None
        self.sharing = {name: Sharing() for name in jobs}
        self.claims, self.done, self.moves = {}, {}, 0
        self.waits = {}  # name: places, and since when it waits with these
        self.fewest = {}  # workers, where it is not one
        self.unfit = set()  # jobs that can take no place
        self.now = 0.0

    def live(self, seconds, each=lambda: None):
        for _ in range(round(seconds / 0.5)):
            self.tick()
            each()

    def tick(self):
        alive = [name for name, (arrival, _, _) in self.jobs.items() if arrival <= self.now and name not in self.done]
        for number, name in enumerate(alive):  # each looks every three seconds
            at = self.now + number * 0.7
            if math.floor(at / 3.0) != math.floor((at - 0.5) / 3.0):
                self.act(name)
        self.place([name for name in alive if name not in self.unfit])
        for name in alive:
            ready = sum(placed is not None and placed + START_SECONDS <= self.now for placed in self.pods[name])
            if ready >= self.fewest.get(name, 1):
                self.left[name] -= 0.5 * sum(self.jobs[name][2][:ready])
            if self.left[name] <= 0:
                self.done[name] = self.now
                self.pods[name] = []
                del self.claims[name]
        self.now += 0.5

    def place(self, names):
        free = self.places - sum(self.held(name) for name in self.pods)
        waiting = [(name, number) for name in names for number, placed in enumerate(self.pods[name]) if placed is None]
        if self.chance:
            self.chance.shuffle(waiting)
        for name, number in waiting[: max(0, free)]:
            self.pods[name][number] = self.now

    def resize(self, places):
        there = [name for name in self.pods for placed in self.pods[name] if placed is not None]
        for name in self.chance.sample(there, max(0, len(there) - places)):
            self.pods[name].remove(next(placed for placed in self.pods[name] if placed is not None))
        self.places = places

    def act(self, name):
        pods, fewest, held = self.pods[name], self.fewest.get(name, 1), self.held(name)
        before, since = self.waits.get(name, (None, 0.0))
        self.waits[name] = held, since if held == before and held < len(pods) else self.now
        waited = self.now - self.waits[name][1]
        own = Claim(name, held, len(pods) - held, fewest, 8, self.left[name], self.jobs[name][2], waited)
        self.claims[name] = own
        self.sharing[name].see(own, list(self.claims.values()), self.now)
        most, _ = self.sharing[name].bound(8, fewest, "")
        self.moves += most != len(pods)
        pods.sort(key=lambda placed: (placed is None, placed or 0))
        del pods[most:]
        pods += [None] * (most - len(pods))

    def held(self, name):
        return sum(placed is not None for placed in self.pods[name])


def test_two_jobs_come_to_the_division_and_stay_there_and_places_that_the_best_can_not_take_are_found_by_another():
    queue = PlayedQueue(8, a=(0.0, 1e9, GOOD), b=(0.0, 1e9, POOR))
    queue.live(100)
    assert (queue.held("a"), queue.held("b")) == (7, 1)
    before = queue.moves
    queue.live(3600)
    assert queue.moves == before
    queue = PlayedQueue(8, a=(0.0, 1e9, GOOD), b=(0.0, 1e9, FAIR))
    queue.live(50)
    queue.unfit, queue.places = {"a"}, 12
    queue.live(300)
    assert (queue.held("a"), queue.held("b")) == (7, 5)


def test_a_newcomer_is_let_in_soon_and_what_is_freed_is_taken():
    queue = PlayedQueue(8, a=(0.0, 1e9, FAIR), b=(100.0, 1e9, FAIR))
    queue.live(100)
    assert queue.held("a") == 8, "one job alone has the whole cluster"
    queue.live(15)
    assert queue.held("b")
    queue.live(15)
    assert (queue.held("a"), queue.held("b")) == (4, 4)
    queue.left["b"] = 0.0
    queue.live(40)
    assert queue.held("a") == 8


def test_a_neighbour_that_can_take_no_place_costs_little():
    queue = PlayedQueue(9, a=(0.0, 1e9, FAIR), b=(0.0, 1e9, FAIR), unfit=(60.0, 1e9, GOOD))
    queue.unfit = {"unfit"}
    queue.live(60)
    used = []
    queue.live(1740, lambda: used.append(queue.held("a") + queue.held("b")))
    assert min(used) >= 4
    assert statistics.fmean(used) > 8.7
    assert queue.moves < 100


@pytest.mark.parametrize("seed", range(20))
def test_every_job_ends_whatever_their_fewest_and_whatever_becomes_of_the_places(seed):
    drawn = random.Random(seed)
    jobs, at = {}, 0.0
    for number in range(drawn.randint(2, 9)):
        jobs[f"j{number}"] = (at, drawn.choice((60.0, 120.0, 240.0)), drawn.choice((GOOD, FAIR, POOR)))
        at += drawn.expovariate(1 / 15)
    queue = PlayedQueue(drawn.randint(4, 10), drawn, **jobs)
    queue.fewest = {name: drawn.choice((1, 1, 1, 2, 3, 4)) for name in jobs}
    queue.unfit = {name for name in jobs if drawn.random() < 0.12}
    while jobs.keys() - queue.done.keys() - queue.unfit:
        queue.tick()
        if drawn.random() < 0.0006:
            queue.resize(max(4, queue.places + drawn.choice((-3, -2, 2, 3))))
        assert queue.now < 3600


# ---- claims in the cluster ----


class Leases:
    def __init__(self):
        self.items = {}
        self.version = 0
        self.mistakes, self.down = [KeyError("metadata"), ValueError("odd"), NoAnswerError(0, "down")], False

    def put(self, job, text):
        self.version += 1
        metadata = {"labels": {JOB_LABEL: job}, "resourceVersion": str(self.version)}
        self.items[job] = {"metadata": {**metadata, "annotations": {CLAIM_ANNOTATION: text} if text else {}}}

    def patch(self, kind, name, change):
        if self.down:
            raise NoAnswerError(0, "the cluster does not answer")
        self.put(name.removesuffix("-claim"), change["metadata"]["annotations"][CLAIM_ANNOTATION])

    def list(self, kind, label_selector):
        assert label_selector == "elasticdl.org/share-queue=team"
        if self.mistakes:
            raise self.mistakes.pop()
        return list(self.items.values())


def look(leases, neighbours):
    leases.mistakes.clear()
    return [each.job for each in neighbours._claims(leases.list("Lease", "elasticdl.org/share-queue=team"))]


def test_claims_count_as_long_as_they_are_renewed():
    leases, clock = Leases(), types.SimpleNamespace(now=0.0)
    neighbours = Neighbours(leases, "a", "team", lambda: clock.now)
    for job in "abc":
        leases.put(job, claim(job).to_json())
    assert look(leases, neighbours) == ["b", "c"]
    clock.now = STALE_SECONDS
    leases.put("b", claim("b").to_json())
    look(leases, neighbours)
    clock.now += 1.0
    assert look(leases, neighbours) == ["b"]
    leases.put("b", None)
    assert look(leases, neighbours) == []


def test_what_cannot_be_read_or_speaks_for_another_does_not_count(caplog):
    leases = Leases()
    for job, text in (("b", "nonsense"), ("c", claim("d").to_json()), ("e", claim("e").to_json())):
        leases.put(job, text)
    neighbours = Neighbours(leases, "a", "team")
    assert look(leases, neighbours) == look(leases, neighbours) == ["e"]
    assert caplog.text.count("what job b claims can't be read") == 1


@pytest.mark.parametrize("down", [False, True])
def test_a_mistake_is_told_once_and_at_the_end_nothing_is_claimed_any_more(caplog, monkeypatch, down):
    for name in ("LOOK_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(f"elasticdl.master.shell.neighbours.{name}", 0.001)
    leases, seen = Leases(), asyncio.Queue()
    neighbours = Neighbours(leases, "a", "team")
    neighbours.claimed(claim("a"))

    async def share():
        async with neighbours.sharing(seen.put_nowait):
            async with asyncio.timeout(10):
                assert (await seen.get()).claims == ()
            leases.down = down

    asyncio.run(share())
    assert caplog.text.count("the jobs of queue team can't be seen") == 1
    assert (CLAIM_ANNOTATION in leases.items["a"]["metadata"]["annotations"]) == down
