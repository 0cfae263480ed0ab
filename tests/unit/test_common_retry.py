"""Attempts, their delays and a bound on how often; and work in the background, of which somebody hears if it fails."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.common.backoff import Backoff, TokenBucket
from elasticdl.common.errors import UnreachableError
from elasticdl.common.retry import Background
from elasticdl.places import agent as agents
from elasticdl.places.agent import Agent
from elasticdl.proto import elasticdl_pb2 as pb


@given(st.integers(0, 100) | st.none(), st.floats(0, 60))
def test_delays_double_up_to_their_bound_and_begin_anew_after_a_success(seed, at_least):
    """A drawn one is of the upper half, and never sooner than asked for."""
    backoff = Backoff(*([] if seed is None else [random.Random(seed)]), first=1.0, longest=8.0)
    for bound in (1.0, 2.0, 4.0, 8.0, *[8.0] * 2000):  # no overflow
        least = bound if seed is None else bound / 2
        assert max(at_least, least) <= backoff.delay(at_least) <= max(at_least, bound)
    backoff.reset()
    assert backoff.delay() <= 1.0


@given(st.lists(st.floats(0, 3), max_size=80))
def test_a_bucket_lets_through_its_burst_and_then_its_rate_and_says_when_to_ask_again(pauses):
    bucket, now, passed = TokenBucket(rate=2.0, burst=5.0), 100.0, 0
    for pause in pauses:
        now += pause
        wait = bucket.take(now)
        passed += wait == 0.0
        assert passed <= 5 + 2.0 * (now - 100.0) + 1e-6
        assert 0.0 <= wait <= 0.5
    assert passed >= min(len(pauses), 5)
    now += 10.0
    assert [bucket.take(now) for _ in range(6)] == [0.0] * 5 + [0.5]
    assert bucket.take(now + 0.5) < 1e-9


async def fails(error):
    raise error


def test_what_a_task_raises_is_told_in_one_line_and_tasks_end_with_their_owner():
    told = []

    async def work():
        background = Background("pods are looked after", told.append)
        for error in (KeyError("uid"), UnreachableError("told elsewhere")):
            background.start(fails(error))
        assert await background.wait()
        lasting = background.start(asyncio.sleep(1000))
        assert not await background.wait(timeout=0.01)
        await background.cancel()
        assert lasting.cancelled()

    asyncio.run(work())
    assert told == ["pods are looked after no longer: KeyError: 'uid'"]


def test_an_agent_that_can_not_look_after_its_worker_gives_its_place_up(monkeypatch):
    """Else a worker would be waited for, of whose end nobody would ever hear."""
    monkeypatch.setattr(agents.WorkerRun, "ended", lambda *_, **__: fails(ValueError("a mistake")))

    async def run():
        agent = Agent(pb.AgentHello(), {}, asyncio.get_running_loop().create_future(), None, lambda **body: None)
        agent.obey(pb.AgentOrder(start=pb.Start(worker_id=3)))
        await asyncio.wait_for(agent.over.wait(), 10)
        return agent.exit_code

    assert asyncio.run(run()) == 1
