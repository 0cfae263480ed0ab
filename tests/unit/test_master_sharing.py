"""How jobs of one queue divide a cluster among themselves, each for itself."""

import asyncio
import random
import statistics
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharing_kit import PlayedCluster

from elasticdl.kube.api_error import NoAnswerError
from elasticdl.kube.manifests.names import CLAIM_ANNOTATION, JOB_LABEL
from elasticdl.master.rules.sharing import Sharing, divide, gains_of
from elasticdl.master.shell.neighbours import STALE_SECONDS, Neighbours
from elasticdl.master.state.claim import RETRIED_EVERY, SKIPPED_AFTER, Claim
from elasticdl.master.state.speedup import Curve, Point

GOOD = tuple(0.98**n for n in range(8))
FAIR = tuple(0.8**n for n in range(8))
POOR = (1.0, 0.3, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0)


def claim(job, held=1, waiting=0, minimum=1, wanted=8, left=1000.0, gains=GOOD, waited=0.0):
    return Claim(job, held, waiting, minimum, wanted, left, gains, waited)


def curve(gains):
    points, total = [], 0.0
    for number, gain in enumerate(gains, 1):
        total += gain
        points.append(Point(number, total, total, total, gain, gain, gain))
    return Curve(tuple(points))


def test_places_go_to_those_that_they_bring_most():
    assert divide([claim("a"), claim("b", gains=POOR)], 8) == {"a": 7, "b": 1}


def test_a_job_that_a_further_place_brings_nothing_says_so():
    sharing = Sharing()
    assert sharing.see(claim("a", held=4, gains=POOR), [], 0.0)
    told = (4, "4 of 4 places that the jobs of its queue have: a further one would bring nothing")
    assert (sharing.share, sharing.reason) == told


def test_a_neighbour_that_is_gone_is_not_shown_as_the_reason():
    sharing, own = Sharing(), claim("a", held=4, waiting=1, gains=FAIR)
    sharing.see(own, [claim("b", held=4, waiting=1, gains=FAIR)], 0.0)
    share = sharing.share
    assert "the last of b brings" in sharing.reason
    assert not sharing.see(own, [claim("c", held=4, waiting=1, gains=FAIR)], 2.0)
    assert sharing.share == share
    assert "the last of c brings" in sharing.reason


def test_of_two_alike_the_shorter_has_more():
    shares = divide(
        [
            claim("long", left=900.0, gains=FAIR),
            claim("short", left=100.0, gains=FAIR),
        ],
        8,
    )
    assert shares["short"] > shares["long"] >= 1


def test_nobody_has_more_than_it_wants_or_can_use():
    assert divide([claim("a", wanted=3), claim("b", gains=POOR)], 100) == {"a": 3, "b": 4}


def test_a_newcomer_has_its_fewest_before_others_have_more():
    assert divide([claim("a", held=8), claim("b", held=0, minimum=2, gains=POOR)], 8) == {"a": 6, "b": 2}


def test_without_room_for_the_fewest_of_all_those_that_run_stay():
    claims = [claim("a", held=3, minimum=3), claim("b", held=3, minimum=3), claim("c", held=0, minimum=3)]
    assert divide(claims, 8) == {"a": 4, "b": 4, "c": 3}  # c goes on asking, and takes no place


def test_of_two_that_have_a_part_of_their_fewest_one_gives_it_back():
    """Else neither would ever train. As soon as the other has its fewest, it asks again."""
    c, d = claim("c", held=2, minimum=5), claim("d", held=3, minimum=5)
    assert divide([c, d], 5) == {"c": 5, "d": 0}
    assert divide([claim("c", held=4, minimum=5), claim("d", held=1, minimum=5)], 5) == {"c": 5, "d": 0}
    assert divide([claim("c", held=5, minimum=5), claim("d", held=0, minimum=5)], 5) == {"c": 5, "d": 5}
    running = claim("b", held=4, minimum=3)
    assert divide([running, claim("c", held=2, minimum=4, left=1.0)], 6) == {"b": 4, "c": 4}, (
        "what is idle harms nobody"
    )


def test_a_job_whose_fewest_become_more_than_its_share_gives_it_back_too():
    others = [claim("b", wanted=1), claim("c", held=2, waiting=1, minimum=3, left=10.0)]
    sharing = Sharing()
    sharing.see(claim("a", held=2), others, 0.0)
    assert sharing.bound(8, 1, "") == (1, sharing.reason)
    sharing.see(claim("a", held=2, minimum=5), others, 2.0)
    assert sharing.bound(8, 5, "") == (1, sharing.reason)


def test_who_waits_in_vain_costs_others_no_places():
    """Its pods may need another kind of node. It goes on waiting, and is tried again now and then."""
    a = claim("a", held=8, gains=FAIR)
    for waited, kept in (
        (0.0, 4),
        (SKIPPED_AFTER, 8),
        (RETRIED_EVERY - 1, 8),
        (RETRIED_EVERY, 7),
        (RETRIED_EVERY + SKIPPED_AFTER, 8),
    ):
        new = claim("b", held=0, waiting=1, waited=waited, gains=FAIR)
        assert divide([a, new], 8) == {"a": kept, "b": max(1, 8 - kept)}


def test_who_waits_long_for_one_more_waits_on_and_another_asks_as_well():
    b = claim("b", held=2, gains=FAIR)
    assert divide([claim("a", held=4, waiting=1), b], 6, probes=1) == {"a": 5, "b": 2}
    assert divide([claim("a", held=4, waiting=1, waited=SKIPPED_AFTER), b], 6, probes=1) == {"a": 5, "b": 3}
    assert divide([claim("a", held=4, waiting=1, waited=SKIPPED_AFTER), b], 7) == {"a": 4, "b": 3}, (
        "nor a place that there is"
    )


def test_a_job_that_is_over_soon_has_no_more_for_that():
    """Others would give up workers that stop, and new ones start, for seconds."""
    b = claim("b", held=6, left=1000.0)
    assert divide([claim("a", held=2, left=70.0), b], 8)["a"] > 4
    assert divide([claim("a", held=2, left=50.0), b], 8, probes=1) == {"a": 2, "b": 7}
    assert divide([claim("a", held=0, waiting=1, left=10.0), b], 7)["a"] > 1, "one that does not run is over never"


def test_who_has_a_place_keeps_it_for_a_small_difference():
    little_less = tuple(gain * 0.9 for gain in GOOD)
    assert divide([claim("a", held=4, gains=little_less), claim("b", held=4)], 8) == {"a": 4, "b": 4}
    assert divide([claim("a", held=4, gains=tuple(gain * 0.5 for gain in GOOD)), claim("b", held=4)], 8)["b"] > 4


def test_of_a_job_without_an_end_the_usual_one_is_taken():
    shares = divide([claim("a", left=-1.0), claim("b", left=400.0), claim("c", left=100.0)], 9)
    assert shares["c"] >= shares["a"] >= 1


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


def test_gains_are_those_of_the_curve_and_beyond_it_nothing_is_expected():
    assert gains_of(curve((1.0, 0.9, 0.5)), 5) == (1.0, 0.9, 0.5, 0.0, 0.0)
    unknown = gains_of(Curve(), 4)
    assert unknown[0] == 1.0
    assert unknown[1] == pytest.approx(2**0.8 - 1, abs=1e-4)
    sparse = Curve(tuple(Point(n, float(n), 0, 0, 1.0, 0, 0) for n in (1, 2, 4)))
    assert gains_of(sparse, 4) == (1.0, 1.0, 1.0, 1.0)
    assert gains_of(sparse, 3) == (1.0, 1.0, 1.0)
    assert gains_of(sparse, 1) == (1.0,)


def test_a_worker_that_adds_nothing_is_no_end_if_the_next_adds_much():
    """Of 24 samples the largest part is four for six and for seven workers, and three for eight."""
    steps = curve((1.0, 1.0, 1.0, 1.0, 0.5, 1.2, -0.1, 1.9))
    assert gains_of(steps, 8) == (1.0, 1.0, 1.0, 1.0, 0.875, 0.875, 0.875, 0.875)
    assert gains_of(steps, 7)[4:] == (0.85, 0.85, -0.1)
    assert divide([claim("a", gains=gains_of(steps, 8))], 8) == {"a": 8}


def test_a_claim_travels_as_text_and_nonsense_is_refused_in_one_line():
    assert Claim.from_json(claim("a").to_json()) == claim("a")
    for text in (
        "",
        "{}",
        claim("a").to_json().replace("1000.0", '"much"'),
        claim("a").to_json().replace('"held":1', '"held":-1'),
    ):
        with pytest.raises(ValueError, match=r"^claim: ") as refusal:
            Claim.from_json(text)
        assert "\n" not in str(refusal.value)


# ---- a whole queue ----


def test_two_jobs_come_to_the_division_and_stay_there():
    cluster = PlayedCluster(8, {"a": (0.0, 1e9, GOOD), "b": (0.0, 1e9, POOR)})
    for _ in range(200):
        cluster.tick(0.5)
    assert (cluster.held("a"), cluster.held("b")) == (7, 1)
    before = cluster.moves
    for _ in range(7200):
        cluster.tick(0.5)
    assert cluster.moves == before


def test_one_job_alone_has_the_whole_cluster():
    cluster = PlayedCluster(8, {"a": (0.0, 1e9, GOOD)})
    for _ in range(60):
        cluster.tick(0.5)
    assert cluster.held("a") == 8


def test_a_newcomer_is_let_in_soon():
    cluster = PlayedCluster(8, {"a": (0.0, 1e9, FAIR), "b": (100.0, 1e9, FAIR)})
    while cluster.held("b") == 0:
        cluster.tick(0.5)
        assert cluster.now < 115.0
    for _ in range(60):
        cluster.tick(0.5)
    assert (cluster.held("a"), cluster.held("b")) == (4, 4)


def test_what_is_freed_is_taken():
    cluster = PlayedCluster(8, {"a": (0.0, 1e9, GOOD), "b": (0.0, 60.0, GOOD)})
    while "b" not in cluster.done:
        cluster.tick(0.5)
    for _ in range(80):
        cluster.tick(0.5)
    assert cluster.held("a") == 8


def test_a_job_that_grows_lets_go_nothing_of_what_it_has_just_got():
    """What was seen most often in the last seconds is less than what there is by now."""
    sharing, shares = Sharing(), [1]
    for look in range(20):
        sharing.see(claim("a", held=shares[-1], wanted=64, left=1e9, gains=(1.0,) * 64), [], 2.0 * look)
        shares.append(sharing.share)
    assert shares == sorted(shares)
    assert shares[-1] == 64


def test_a_neighbour_that_can_take_no_place_costs_little():
    cluster = PlayedCluster(9, {"a": (0.0, 1e9, FAIR), "b": (0.0, 1e9, FAIR), "unfit": (60.0, 1e9, GOOD)})
    cluster.unfit = {"unfit"}
    used = []
    while cluster.now < 1800.0:
        cluster.tick(0.5)
        used.append(cluster.held("a") + cluster.held("b"))
    assert min(used[120:]) >= 4
    assert sum(used[120:]) / len(used[120:]) > 8.7
    assert cluster.moves < 100


def test_places_that_the_best_can_not_take_are_found_by_another():
    cluster = PlayedCluster(8, {"a": (0.0, 1e9, GOOD), "b": (0.0, 1e9, FAIR)})
    for _ in range(100):
        cluster.tick(0.5)
    assert (cluster.held("a"), cluster.held("b")) == (7, 1)
    cluster.unfit, cluster.places = {"a"}, 12
    for _ in range(600):
        cluster.tick(0.5)
    assert (cluster.held("a"), cluster.held("b")) == (7, 5)


def test_sharing_is_better_than_fixed_sizes_and_all_jobs_end():
    parts = []
    for seed in range(8):
        seeded = random.Random(seed)
        jobs, at = {}, 0.0
        for number in range(8):
            gains = seeded.choice((GOOD, FAIR, POOR))
            jobs[f"j{number}"] = (at, seeded.choice((60.0, 120.0, 240.0, 480.0)), gains)
            at += seeded.expovariate(1 / 25)
        cluster = PlayedCluster(8, jobs)
        while len(cluster.done) < 8:
            cluster.tick(0.5)
            assert cluster.now < 3600
        shared = sum(cluster.done[name] - jobs[name][0] for name in jobs)
        parts.append(shared / fixed_size(jobs, 4))
    assert statistics.fmean(parts) < 0.9


@pytest.mark.parametrize("seed", range(40))
def test_every_job_ends_whatever_their_fewest_and_whatever_becomes_of_the_places(seed):
    drawn = random.Random(seed)
    jobs, at = {}, 0.0
    for number in range(drawn.randint(2, 9)):
        jobs[f"j{number}"] = (at, drawn.choice((60.0, 120.0, 240.0)), drawn.choice((GOOD, FAIR, POOR)))
        at += drawn.expovariate(1 / 15)
    cluster = PlayedCluster(drawn.randint(4, 10), jobs, chance=drawn)
    cluster.fewest = {name: drawn.choice((1, 1, 1, 2, 3, 4)) for name in jobs}
    cluster.unfit = {name for name in jobs if drawn.random() < 0.12}
    while jobs.keys() - cluster.done.keys() - cluster.unfit:
        cluster.tick(0.5)
        if drawn.random() < 0.0006:
            cluster.resize(max(4, cluster.places + drawn.choice((-3, -2, 2, 3))))
        assert cluster.now < 3600


def fixed_size(jobs, size):
    """The sum of the completion times if each job waits for so many of 8 places."""
    free_at, total = [0.0] * (8 // size), 0.0
    for arrival, work, gains in jobs.values():
        begin = max(arrival, min(free_at)) + 6
        free_at[free_at.index(min(free_at))] = end = begin + work / sum(gains[:size])
        total += end - arrival
    return total


# ---- claims in the cluster ----


class Leases:
    def __init__(self):
        self.items = {}
        self.version = 0
        self.down = False

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
        return list(self.items.values())


def look(leases, neighbours):
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
    leases.put("b", "nonsense")
    leases.put("c", claim("d").to_json())
    leases.put("e", claim("e").to_json())
    neighbours = Neighbours(leases, "a", "team")
    assert look(leases, neighbours) == look(leases, neighbours) == ["e"]
    assert caplog.text.count("what job b claims can't be read") == 1


def test_a_mistake_is_told_once_and_claims_are_exchanged_again_after_it(caplog, monkeypatch):
    for name in ("LOOK_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(f"elasticdl.master.shell.neighbours.{name}", 0.001)
    leases, seen = Leases(), asyncio.Queue()
    listed, mistakes = leases.list, [KeyError("metadata"), ValueError("odd"), NoAnswerError(0, "down")]
    leases.list = lambda *given, **named: listed(*given, **named) if not mistakes else raise_(mistakes.pop())
    neighbours = Neighbours(leases, "a", "team")
    neighbours.claimed(claim("a"))

    async def share():
        async with neighbours.sharing(seen.put_nowait):
            async with asyncio.timeout(10):
                return await seen.get()

    assert asyncio.run(share()).claims == ()
    assert caplog.text.count("the jobs of queue team can't be seen") == 1


def raise_(error):
    raise error


@pytest.mark.parametrize("down", [False, True])
def test_at_the_end_nothing_is_claimed_any_more(down):
    leases, seen = Leases(), []
    neighbours = Neighbours(leases, "a", "team")
    neighbours.claimed(claim("a"))

    async def share():
        async with neighbours.sharing(seen.append):
            async with asyncio.timeout(10):
                while not seen:
                    await asyncio.sleep(0.01)
            leases.down = down

    asyncio.run(share())
    assert [event.claims for event in seen] == [()]
    assert (CLAIM_ANNOTATION in leases.items["a"]["metadata"]["annotations"]) == down
