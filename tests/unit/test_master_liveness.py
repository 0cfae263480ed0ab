"""Who is given up for being silent."""

from elasticdl.master.core.events import HeartbeatReceived
from elasticdl.master.core.liveness import Liveness


def silent_at(liveness, now):
    return list(liveness.silent(now))


def test_one_that_has_not_asked_may_be_importing():
    liveness = Liveness(heartbeat_timeout=2, progress_timeout=300)
    liveness.connected(0, 0.0)
    assert silent_at(liveness, 10_000) == []


def test_one_that_has_asked_must_beat_from_then_on():
    liveness = Liveness(heartbeat_timeout=2, progress_timeout=300)
    liveness.connected(0, 0.0)
    liveness.asked(0, 100.0)
    assert silent_at(liveness, 101.9) == []
    assert liveness.silent(102.1) == {0: "no heartbeat for 2 s"}
    liveness.heard(HeartbeatReceived(0, 0, 0, 1, False), 102.1)
    assert silent_at(liveness, 104.0) == []


def test_a_broken_connection_has_nothing_to_do_with_importing():
    liveness = Liveness(heartbeat_timeout=2, progress_timeout=300)
    liveness.connected(0, 0.0)
    liveness.disconnected(0, 10.0)
    assert liveness.silent(12.1) == {0: "no connection for 2 s"}
    liveness.connected(0, 11.0)
    assert silent_at(liveness, 60) == []
