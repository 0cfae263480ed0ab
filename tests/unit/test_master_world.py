"""When a world is formed, of whom, in which order, and exactly what is said about it."""

import pytest
from master_kit import LONG, Yard, killed, only

from elasticdl.job import messages
from elasticdl.master.core import events as e
from elasticdl.master.core.events import Record, Tell
from elasticdl.master.core.values import World

WINDOW = 0.3
CLEAN = e.ExitCause.CLEAN


class Meeting(Yard):
    """Its workers are never late unless ``times`` say when; it shows what is said about worlds."""

    shows = Tell

    def __init__(self, minimum=2, maximum=4, **times):
        super().__init__(
            maximum, minimum, **{"start_timeout": LONG, "stop_grace": LONG, "join_window": WINDOW, **times}
        )
        self.advance()

    def advance(self, seconds=0.0):
        self.now += seconds
        return self.post(e.Tick())

    def beat(self, worker_id, seconds):
        """It is heard of once more, and time passes."""
        self.post(e.FromWorker(worker_id, messages.Heartbeat(0, 0, 0, False)))
        return self.advance(seconds)

    def cut(self, worker_id):
        return self.post(e.WorkerDisconnected(worker_id))

    def drain(self, worker_id, lingers=False):
        return self.post(e.FromWorker(worker_id, messages.Draining("told to", lingers)))

    def world_of(self, *ids):
        """Form the first world, of these."""
        self.come(*ids)
        self.advance(WINDOW)
        assert self.members == list(ids)
        return self.job.rendezvous.version

    @property
    def members(self):
        """By rank."""
        workers = [worker for worker in self.job.workers if worker.rank >= 0]
        return [worker.worker_id for worker in sorted(workers, key=lambda worker: worker.rank)]

    def state(self, worker_id):
        return next(worker.state for worker in self.job.snapshot().workers if worker.worker_id == worker_id)


def published(instructions):
    return [list(told.message.worker_ids) for told in only(World, instructions)]


def test_workers_that_start_together_form_one_world():
    m = Meeting()
    assert m.come(0, 1) == []
    m.advance(0.2)
    assert m.come(2) == []
    assert m.advance(0.2) == []  # the window runs from the latest arrival
    assert published(m.advance(0.2)) == [[0, 1, 2]]
    assert published(Meeting(maximum=2).come(0, 1)) == [[0, 1]], "a full world does not wait"


def test_steady_arrivals_are_not_waited_for_forever():
    m = Meeting(minimum=1, maximum=100)
    formed = []
    for worker_id in range(20):
        formed += m.come(worker_id) + m.advance(0.2)
        if formed:
            break
    assert formed
    assert m.now <= 5 * WINDOW + 0.2


def test_a_world_waits_for_further_newcomers_and_for_nobody_once_it_has_lost_a_member():
    def world_of_four_and_two_newcomers():
        m = Meeting(minimum=4, maximum=8)
        version = m.world_of(0, 1, 2, 3)
        m.come(4)
        assert m.advance(0.9 * WINDOW) == []
        m.come(5)
        assert m.advance(0.2 * WINDOW) == []
        return m, version

    m, version = world_of_four_and_two_newcomers()
    assert m.advance(0.7 * WINDOW) == []
    assert m.advance(0.2 * WINDOW) == [Tell((0, 1, 2, 3), messages.Change(version, "workers 4, 5 join"))]
    m, version = world_of_four_and_two_newcomers()
    assert m.exit(3) == [Tell((0, 1, 2), messages.Broken(version, "worker 3 killed: detail"))]
    m.cut(4)
    m.cut(5)
    for worker_id in (0, 1, 2):
        m.ask(worker_id, step=1, left=version, broken=True)
    m.come(6)
    assert published(m.advance(1.1 * WINDOW)) == [[0, 1, 2, 6]]


def test_survivors_hear_that_their_world_is_broken_before_anything_is_recorded():
    """To record may take long, as on a slow disk."""
    m = Meeting()
    m.world_of(0, 1)
    before = len(m.out)
    m.exit(1)
    first, *rest = m.out[before:]
    assert isinstance(first.message, messages.Broken)
    assert any(isinstance(each, Record) for each in rest)


@pytest.mark.parametrize("clean", [True, False])
def test_a_member_that_drains_is_not_waited_for_and_breaks_the_world_if_it_dies_before_the_others_have_left(clean):
    m = Meeting()
    version = m.world_of(0, 1, 2)
    assert m.drain(1) == [Tell((0, 2), messages.Change(version, "worker 1 leaves: told to"))]
    m.ask(0, step=5, left=version)
    torn = [] if clean else [Tell((2,), messages.Broken(version, "worker 1 leaves: told to"))]
    assert m.exit(1, *((CLEAN, 0) if clean else ())) == torn
    assert published(m.ask(2, step=5, left=version)) == [[0, 2]]


def test_a_member_without_session_is_given_up_once_a_survivor_finds_the_world_broken():
    m = Meeting()
    version = m.world_of(0, 1, 2)
    m.cut(1)
    assert m.advance(1.0) == []  # it may come back
    assert m.ask(0, step=5, left=version, broken=True, reason="peer closed")[0].to == (2,)
    assert published(m.ask(2, step=5, left=version, broken=True)) == [[0, 2]]
    assert m.job.rendezvous.why_changed == "worker 1 lost its connection"
    m.exit(1)
    assert m.job.rendezvous.why_changed == "worker 1 killed: detail", "which is known only now"


def test_a_member_that_reconnects_is_told_what_it_missed():
    m = Meeting()
    version = m.world_of(0, 1)
    m.cut(1)
    (again,) = m.connect(1, version=version - 1)
    assert (again.message.version, again.to) == (version, (1,))
    m.come(2)
    m.advance(WINDOW)
    m.cut(1)
    assert m.connect(1, version=version) == [Tell((1,), messages.Change(version, "worker 2 joins"))]


def test_ranks_go_by_state_then_step_then_old_rank_then_id():
    m = Meeting(maximum=6)
    version = m.world_of(0, 1, 2)
    m.come(3)
    m.advance(WINDOW)
    m.ask(0, step=0, left=version, has_state=False)
    m.ask(2, step=8, left=version)
    assert published(m.ask(1, step=7, left=version)) == [[2, 1, 0, 3]]


def test_an_ask_about_an_earlier_world_changes_nothing():
    m = Meeting()
    m.world_of(0, 1)
    assert m.ask(0, left=0, broken=True) == []
    assert m.members == [0, 1]


def test_of_two_at_one_step_the_one_of_the_later_world_leads():
    """Worker 0 alone got the result of step 5, and was cut off; the others have made theirs."""
    m = Meeting(minimum=1, maximum=2)
    version = m.world_of(0, 1)
    m.cut(0)
    m.ask(1, step=4, left=version, broken=True)
    m.connect(0)
    m.post(e.FromWorker(0, messages.Ask(version, 5, True, True, synced_in=version)))
    (formed,) = m.post(e.FromWorker(1, messages.Ask(version + 1, 5, True, synced_in=version + 1)))
    assert [(each.worker_id, each.synced_in) for each in formed.message.members] == [(1, version + 1), (0, version)]


def test_one_that_has_left_a_later_world_than_is_known_comes_into_a_later_one_still():
    """The saves of the world that it left are lost, and the master took up the one before."""
    m = Meeting()
    version = m.world_of(0, 1)
    assert m.ask(0, step=9, left=version + 1, broken=True) == [
        Tell((1,), messages.Broken(version, "worker 0: left the world"))
    ]
    (formed,) = m.ask(1, step=5, left=version)
    assert (formed.message.version, formed.message.worker_ids) == (version + 2, (0, 1))
    m = Meeting()
    m.connect(0, version=41)
    m.ask(0)
    m.come(1)
    m.advance(WINDOW)
    assert m.job.rendezvous.version == 42, "versions continue after those that workers know"


def test_after_a_member_has_finished_no_newcomer_is_let_in_but_survivors_form_a_world_however_few():
    m = Meeting()
    version = m.world_of(0, 1, 2)
    m.come(3)
    m.finish(0)
    assert m.advance(100) == []
    m.exit(1)
    assert published(m.ask(2, step=9, left=version, broken=True)) == [[2]]


def test_the_only_member_stays_until_its_replacement_is_there_if_it_says_so():
    m = Meeting(minimum=1, maximum=1)
    version = m.world_of(0)
    assert m.drain(0, lingers=True) == []
    assert m.advance(100) == []
    m.come(1)
    m.advance(WINDOW)
    assert published(m.ask(0, step=7, left=version)) == [[0, 1]]
    (change,) = m.drain(0)
    assert change.to == (1,)


def test_of_members_that_are_all_told_to_leave_the_last_stays_until_a_newcomer_has_its_state():
    m = Meeting(minimum=1, maximum=2)
    version = m.world_of(0, 1)
    m.post(*(e.FromWorker(each, messages.Heartbeat(version, 7, 1, False)) for each in (0, 1)))
    m.drain(0, lingers=True)
    assert m.state(0) == "draining"
    m.drain(1, lingers=True)
    assert m.state(1) == "member"
    assert published(m.ask(1, step=7, left=version)) == [[1]]
    m.exit(0, CLEAN, 0)
    m.come(2)
    m.advance(WINDOW)
    assert published(m.ask(1, step=7, left=version + 1)) == [[1, 2]]
    m.post(e.FromWorker(2, messages.Heartbeat(version + 2, 7, 1, False)))
    m.drain(2, lingers=True)
    assert m.state(2) == "member", "who waits for a successor does not count"


def test_one_that_is_told_while_newcomers_have_not_got_its_state_yet_stays():
    m = Meeting(minimum=1, maximum=2)
    version = m.world_of(0)
    m.come(1)
    m.advance(WINDOW)
    assert published(m.ask(0, step=7, left=version)) == [[0, 1]]
    m.drain(0, lingers=True)
    assert m.state(0) == "member"


def test_no_world_without_state_is_formed_while_the_last_who_has_it_may_be_writing_it():
    m = Meeting(minimum=1)
    m.world_of(0)
    m.drain(0)
    m.come(1)
    assert m.advance(100) == []
    assert "may be writing the state" in m.reason
    assert published(m.exit(0, CLEAN, 0)) == [[1]]


def test_one_that_leaves_and_is_ahead_of_all_who_are_ready_may_have_finished_and_is_waited_for():
    m = Meeting(minimum=1, maximum=2)
    version = m.world_of(0, 1)
    m.cut(1)
    m.ask(0, step=5, left=version, broken=True)
    assert m.members == [0]
    m.drain(0)
    m.connect(1)
    assert published(m.ask(1, step=5, left=version, broken=True)) == []  # 0 may have made a step since
    assert m.reason == "waits for a worker that leaves: it may have finished"
    m.finish(0)
    assert m.reason == "training is complete"


@pytest.mark.parametrize(("known", "awaited"), [(5, False), (6, True)])
def test_how_far_one_is_that_leaves_is_known_from_its_heartbeats(known, awaited):
    m = Meeting(minimum=1)
    version = m.world_of(0, 1)
    m.post(e.FromWorker(0, messages.Heartbeat(version, known, 1, False)))
    m.drain(0)
    assert published(m.ask(1, step=5, left=version, broken=True)) == ([] if awaited else [[1]])
    assert published(m.exit(0, CLEAN, 0)) == ([[1]] if awaited else [])


@pytest.mark.parametrize("comes_back", [True, False])
def test_no_world_without_state_is_formed_before_one_that_was_cut_off_with_it_is_given_up(comes_back):
    m = Meeting(minimum=1, heartbeat_timeout=2.0)
    version = m.world_of(0, 1)
    m.come(2)
    m.cut(0)
    assert published(m.exit(1)) == []
    assert m.reason == "waits for a worker that was cut off: it may have the state"
    assert published(m.beat(2, 0.9) + m.beat(2, 0.9)) == []
    if comes_back:
        m.connect(0, version=version)
        assert published(m.ask(0, step=5, left=version, broken=True)) == [[0, 2]]
    else:
        assert (published(m.beat(2, 0.9)), m.state(0)) == ([[2]], "killing")


def test_the_job_is_complete_when_all_that_are_left_have_finished():
    m = Meeting()
    m.world_of(0, 1, 2)
    m.finish(0)
    m.finish(1)
    assert m.phase == "running"
    m.exit(2)
    assert m.reason == "training is complete"


def test_one_that_is_being_killed_may_still_say_that_all_have_finished():
    m = Meeting(minimum=1, maximum=1, heartbeat_timeout=2.0)
    m.world_of(0)
    m.cut(0)
    for _ in range(3):
        m.advance(0.9)
    assert m.state(0) == "killing"
    m.connect(0)
    m.finish(0, together=True)
    assert m.reason == "training is complete"
    m.come(1)
    assert m.advance(100) == []


def test_a_training_that_all_have_finished_is_complete_though_nobody_knows_their_world():
    m = Meeting(minimum=2, maximum=2)
    m.connect(0)
    m.finish(0, together=True)
    assert m.reason == "training is complete"


def test_once_all_have_finished_the_loss_of_those_who_missed_it_begins_nothing_anew():
    m = Meeting(minimum=1, maximum=3)
    version = m.world_of(0, 1, 2)
    m.exit(2)
    m.ask(1, step=9, left=version, broken=True)
    assert published(m.finish(0, together=True)) == [[1]]
    m.come(3)
    m.exit(1)
    assert m.reason == "training is complete"


def test_no_deadline_runs_while_the_state_can_not_be_saved():
    m = Meeting(minimum=1, stop_grace=3.0, progress_timeout=4.0)
    m.world_of(0, 1)
    m.drain(1)
    m.post(e.StateSaveStalled("the store is down"))
    for _ in range(20):
        m.advance(1.0)
    m.post(e.StateSaveStalled(""))
    m.advance(1.0)
    assert (m.state(0), m.state(1)) == ("member", "draining")
    m.advance(3.0)
    assert m.state(1) == "killing"


def test_the_end_of_a_job_has_its_grace_once_the_state_is_saved():
    m = Meeting(minimum=1, stop_grace=3.0)
    m.world_of(0)
    m.post(e.StopRequested("enough"), e.StateSaveStalled("the store is down"))
    for _ in range(20):
        m.advance(1.0)
    m.post(e.StateSaveStalled(""))
    late = (0, "had not left 3 s after it was to")
    for _ in range(2):
        assert late not in killed(m.out)
        m.advance(2.0)
    assert late in killed(m.out)


def test_who_is_no_member_has_made_no_step():
    m = Meeting(maximum=3)
    version = m.world_of(0, 1)
    m.train(0, 1, 2)
    m.post(e.FromWorker(2, messages.Hello("h", 1)))
    for world_version in (version, version + 1):
        for worker_id in (2, 7):
            made_up = messages.StepReport(90, 5, 0.5, 8, 0.1, 0.05, world_version, 720, False)
            m.post(e.FromWorker(worker_id, messages.Progress((made_up,), 90, 6)))
    m.post(
        e.FromWorker(
            1, messages.Progress((messages.StepReport(90, 5, 0.5, 8, 0.1, 0.05, version + 1, 720, False),), 90, 6)
        )
    )
    assert (m.job.training.step, m.job.training.total_steps) == (2, 1000)
    m.train(1, 3)
    assert m.job.training.step == 3
