"""The master dies, and another follows: it has the last saved memory, what there is, and what workers say."""

import pytest
from play_kit import step, tell

from elasticdl.job import messages as m
from elasticdl.job.messages import Member
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, WorkerSnapshot
from tests.stories import told_in

TIMES = {"heartbeat_timeout": 4.0, "progress_timeout": 6.0, "stop_grace": 5.0, "recovery_timeout": 8.0}

# Workers do by themselves what they are told, and come back as soon as they can; `away`: after so many ticks of half a second.
RESTARTS = """
an intact world outlives its masters and nobody is told anything (2-4)
  for AWAY in 0-3 away 0, 1 away 14, 0-3 away 14
  wait 2; die; AWAY; rise; wait 9 -> launch 0 1 2 3; world 1: 0 1 2 3
  die; wait 10; AWAY; rise; wait 29 -> nothing; version = 1; members = 0 1 2 3; step = 0
a master that remembers nothing has all form another world and no step is lost (2-4)
  wait 2; die; rise blank; wait 3 -> ...; world 2: 0 1 2 3; warning = 0
  3 killed; wait 5 -> ...; members = 0 1 2 4
a world that nobody remembers is broken and formed anew by those who are back (2-4)
  wait 2 -> launch 0 1 2 3; world 1: 0 1 2 3
  die; 0 killed; rise blank 0; tick; wait 5 -> broken 1 for 1 2 3: the master does not know all of its members; ...;
      members = 1 2 3 4
a world that was formed after the last save is broken by who does not know its members (2-2)
  wait 2; 0-1 away; die; rise; 0-1 connect world 2
      -> launch 0 1; world 1: 0 1; broken 2 for 0 1: the master does not know all of its members
a member that died in the absence is missed (2-4)
  wait 2; die; 2 killed; rise; wait 5 -> ...; members = 3 0 1 4; worker_left cause = killed
a member of which nothing is left is missed (2-4)
  wait 2; die; 2 killed; rise 2; wait 5 -> ...; members = 3 0 1 4; worker_left cause = lost
a member that never comes back is missed as in any world that does not train (2-4)
  for RISE in rise, rise blank, 0 1 3 ask broken; rise, 0 1 3 ask broken; rise blank
  wait 2 -> launch 0 1 2 3; world 1: 0 1 2 3
  die; 2 silent; RISE; wait 4 -> nothing
  wait 1 -> ...; kill 2: had not come back 5 s after the master was started again; ...
  wait 5 -> ...; members = 0 1 3 4
one that is told to leave stays if no member comes back that has the state (2-2)
  wait 2; die; 1 silent; rise; tick; 0 drains lingering; wait 6 -> launch 0 1; world 1: 0 1; ...; world 2: 0 2 3
a member that is away is waited for as long as the world trains and its standbys say nothing (2-4)
  wait 2; scale 2-5; 0-3 away 14; die; rise; wait 7 -> launch 0 1 2 3; world 1: 0 1 2 3; launch 4
  -> reason = the master was started again, and waits for workers to come back
  wait 10 -> change 1 for 0 1 2 3: worker 4 joins; world 2: 0 1 2 3 4; reason =
  -> master_restarted world = 1; master_restarted members = [0, 1, 2, 3]; master_restarted missing = [];
      phase phase = running
a worker is waited for long if nobody shows that the new masters address is known (1-1)
  wait 2; die; 0 silent; rise; wait 7.5 -> launch 0; world 1: 0
  wait 1 -> kill 0: ...; launch 1
a master that was held up while it listened misses nobody for it (2-4)
  wait 2; die; rise; tick; 0 connects; jump 7; tick; wait 5 -> launch 0 1 2 3; world 1: 0 1 2 3; members = 0 1 2 3
a worker that a master without memory has found is waited for by the next one too (1-2)
  wait 2; 0 away; die; rise blank; wait 1; die; rise; wait 1 -> launch 0 1; world 1: 0 1;
      reason = ...waits for workers...
  0 away 0; wait 2 -> broken 1 for ...; world 2: 0 1; warning = 0
one that left in the absence counts as no crash (2-4)
  wait 2; die; 3 leaves; rise; wait 6; die; 4 leaves; rise; wait 6; die; 5 leaves; rise; wait 6; die; 6 leaves; rise;
      wait 6 -> members = 2 0 1 7
  -> worker_left cause = drained, drained, drained, drained; worker_left reason = left while there was no master, ...
crashes count on (1-1)
  found; tick; 0 crashed; die; rise; 1 crashed; die; rise; 2 crashed -> ...;
      end failed: 3 workers in a row failed at the start, last worker 2: ...
it is said when the state was lost with the master (1-1)
  wait 2; 0 steps 7; die; 0 killed; rise; wait 5 -> ...; warning message = ...held the state after step 7...

a stop that was decided stays decided and is not held up by those who are away (2-4)
  wait 2; stop: enough; 0-3 away 6; die; rise -> ...; phase = stopping
  wait 30 -> ...; end stopped: enough; version = 1
a stop is not held up by those who have not come back (2-4)
  wait 2; 0-3 away 6; die; rise; scale 1-3; stop: enough -> ...; phase = stopping
  wait 10 -> ...; end stopped: enough
the version of a world that was left since the last save is not used again (1-2)
  wait 2; 0-1 away; die; rise; 0 connects world 0; 0 asks left 2 step 9 broken; die; rise -> ...; version = 1
who has finished is remembered though others are still waited for (1-2)
  wait 2; 0 finishes; 0 clean; 1 away; die; rise; 1 cut; 1 finishes; 1 connects world 1; tick -> ...;
      reason = training is complete
who finishes while the master listens is known to the next one (2-2)
  wait 2; 1 away; die; rise; 0 connects world 1; 0 finishes; 0 clean; die; rise; 1 away 0; wait 5
      -> launch 0 1; world 1: 0 1; worker_left cause = finished
that all have finished together is known to the next master (2-2)
  wait 2; 1 finishes together; die; rise; wait 1; 0 killed; tick -> ...; reason = training is complete
what is left of workers that were gone before is no news (2-4)
  wait 2; 0 1 killed; wait 5 -> ...; workers = 2 3 4 5; worker_left worker = 0, 1
  die; rise over 0 1; wait 3 -> nothing; workers = 2 3 4 5; worker_left worker = 0, 1; master_restarted = 1
"""


@pytest.mark.parametrize("story", told_in(RESTARTS))
def test_restarts(story):
    tell(story, obedient=True, **TIMES)


def published(instructions):
    return [
        told.message.worker_ids for told in instructions if isinstance(told, e.Tell) and isinstance(told.message, World)
    ]


@pytest.mark.parametrize("asks", [True, False])
def test_one_that_is_back_is_heard_out_before_a_world_without_state_is_formed_and_not_without_end(asks):
    """That it holds the state is in its request, which follows. A newcomer waits."""
    there = tuple(WorkerSnapshot(each, WorkerState.STANDBY, "", world_version=1, ready=True) for each in (1, 2))
    world = World(3, (Member(0, "h", 5, True),), "")
    memory = JobSnapshot(WorkerRange(minimum=1, maximum=2), next_id=3, workers=there, world=world)
    times = {} if asks else {"start_timeout": 5.0, "heartbeat_timeout": 60.0}
    job = Job(Settings(memory.limits, **times), memory)
    hellos = [e.FromWorker(each, m.Hello("h", 1)) for each in (1, 2)]
    found = e.WorkersFound(tuple(e.FoundWorker(each, "h", 1) for each in (1, 2)))
    for event in (found, hellos[1], e.FromWorker(2, m.Ask(0, 0, False, False)), hellos[0]):
        assert published(step(job, event, 0.0)) == []
    assert job.reason == "waits for a worker that was cut off: it may have the state"
    if asks:
        assert published(step(job, e.FromWorker(1, m.Ask(2, 5, True, True)), 0.1)) == [(1, 2)]
    else:
        assert published(step(job, e.Tick(), 5.1)) == []
        told = step(job, e.Tick(), 6.2)
        assert e.KillWorker(1, "not ready 5 s after its start") in told
        assert published(told) == [(2,)]
