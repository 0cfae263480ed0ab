"""What everybody must do who provides places. An adapter of yours joins by a bench, as those below."""

from functools import partial

from places_kit import NOWHERE, FakeProvider, bench_of

from elasticdl.places.base import PlaceState
from elasticdl.places.local import Slots
from elasticdl.places.polled import PolledPlaces
from tests.stories import on_each


def slots_bench(tmp_path):
    return bench_of(partial(Slots, 2, [], tmp_path))


def gpus_bench(tmp_path):
    return bench_of(partial(Slots, 0, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"], tmp_path, gpus_per_slot=2))


def polled_bench(tmp_path):
    provider = FakeProvider(2)
    return bench_of(partial(PolledPlaces, provider, seconds=0.01), lambda bench, place_id: provider.lose(place_id))


BENCHES = {"slots": slots_bench, "gpus": gpus_bench, "polled": polled_bench}
THAT_LOSE = {"polled": polled_bench}  # slots of this machine are not lost while this process lives
CHECKS = []


def contract(check, benches=BENCHES):
    """Run a check on all of them."""
    CHECKS.append(check)
    return on_each(benches)(check)


@contract
async def test_what_is_wanted_comes_and_to_say_it_again_changes_nothing(bench):
    for _ in range(3):
        await bench.become_ready(2)
    bench.places.want(2, frozenset({"some-node"}))
    await bench.places.close()
    await bench.has(ready=0)
    assert len(bench.ids) == 2


@contract
async def test_what_there_is_no_room_for_waits_and_says_why(bench):
    await bench.become_ready(2)
    bench.places.want(3, NOWHERE)
    await bench.has(ready=2, waiting=1)
    await bench.until(lambda bench: all(p.reason for p in bench.now.values() if p.state is PlaceState.WAITING))
    bench.places.give_back(bench.ready()[0], at_once=True)
    await bench.until(lambda bench: bench.lost)
    await bench.has(ready=2)


@contract
async def test_with_fewer_wanted_those_that_wait_go_and_those_that_are_ready_stay(bench):
    bench.places.want(4, NOWHERE)
    await bench.has(ready=2, waiting=2)
    ready = bench.ready()
    for most, waiting in ((3, 1), (0, 0)):
        bench.places.want(most, NOWHERE)
        await bench.has(ready=2, waiting=waiting)
    assert bench.ready() == ready


@contract
async def test_a_place_that_is_given_back_is_lost_once(bench):
    await bench.become_ready(2)
    given, kept = bench.ready()
    for _ in range(2):
        bench.places.give_back(given, at_once=True)
    bench.places.give_back("unknown", at_once=False)
    await bench.until(lambda bench: bench.lost)
    await bench.become_ready(2)
    assert (kept in bench.ready(), given in bench.ready()) == (True, False)


@partial(contract, benches=THAT_LOSE)
async def test_a_place_that_is_lost_is_told_once_and_can_be_had_again(bench):
    await bench.become_ready(2)
    lost, kept = bench.ready()
    bench.lose(bench, lost)
    await bench.until(lambda bench: list(bench.lost) == [lost])
    await bench.become_ready(2)
    assert (kept in bench.ready(), lost in bench.ready()) == (True, False)


@contract
async def test_close_gives_back_everything_and_tells_it(bench):
    bench.places.want(3, NOWHERE)
    await bench.has(ready=2, waiting=1)
    await bench.places.close()
    await bench.until(lambda bench: len(bench.lost) == 3)
    assert bench.nothing_more()
