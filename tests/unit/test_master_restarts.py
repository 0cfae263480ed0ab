"""The master dies, and another follows: it has the last saved memory, what there is, and what workers say."""

import pytest
from play_kit import tell

from tests.stories import told_in

TIMES = {"heartbeat_timeout": 4.0, "progress_timeout": 6.0, "stop_grace": 5.0, "recovery_timeout": 8.0}

# Workers do by themselves what they are told, and come back as soon as they can; `away`: after so many ticks of half a second.
RESTARTS = """
an intact world outlives its masters and nobody is told anything (2-4)
  for AWAY in 0-3 away 0, 1 away 14, 0-3 away 14
  wait 2; die; AWAY; rise; wait 9 -> launch 0 1 2 3; world 1: 0 1 2 3
  die; wait 10; AWAY; rise; wait 29 -> nothing; version = 1; members = 0 1 2 3; step = 0
the journal has that a worker was started while there was no master (1-1)
  found; tick; die; rise -> launch 0; worker_started worker = 0; worker_started pid = 1
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
a member of which nothing is left is missed (2-4)
  wait 2; die; 2 killed; rise 2; wait 5 -> ...; members = 3 0 1 4; worker_left cause = lost
a member that never comes back is missed as in any world that does not train (2-4)
  for RISE in rise, rise blank, 0 1 3 ask broken; rise, 0 1 3 ask broken; rise blank
  wait 2 -> launch 0 1 2 3; world 1: 0 1 2 3
  die; 2 silent; RISE; wait 4 -> nothing
  wait 1 -> ...; kill 2: had not come back 5 s after the master was started again; ...
  wait 5 -> ...; members = 0 1 3 4
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
who has finished is remembered though others are still waited for (1-2)
  wait 2; 0 finishes; 0 clean; 1 away; die; rise; 1 cut; 1 finishes; 1 connects world 1; tick -> ...;
      reason = training is complete
what is left of workers that were gone before is no news (2-4)
  wait 2; 0 1 killed; wait 5 -> ...; workers = 2 3 4 5; worker_left worker = 0, 1
  die; rise over 0 1; wait 3 -> nothing; workers = 2 3 4 5; worker_left worker = 0, 1; master_restarted = 1
"""


@pytest.mark.parametrize("story", told_in(RESTARTS))
def test_restarts(story):
    tell(story, obedient=True, **TIMES)
