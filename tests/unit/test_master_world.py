"""When a world is formed, of whom, in which order, and exactly what is said about it."""

import pytest
from play_kit import tell

from tests.stories import told_in

WORLDS = """
workers that start together form one world, which waits for others since the latest arrival (2-4)
  tick; 0 1 come -> nothing
  wait 0.2; 2 comes; wait 0.2 -> nothing
  wait 0.2 -> world 1: 0 1 2
steady arrivals are not waited for forever (1-100)
  tick; 0 comes; wait 0.2; 1 comes; wait 0.2; 2 comes; wait 0.2; 3 comes; wait 0.2; 4 comes; wait 0.2; 5 comes;
      wait 0.2; 6 comes; wait 0.2; 7 comes; wait 0.2 -> world 1: ...
a world waits for further newcomers (4-8)
  0-3 train
  4 comes; wait 0.2; 5 comes; wait 0.2 -> nothing
  wait 0.2 -> change 1 for 0 1 2 3: workers 4, 5 join
a world waits for nobody once it has lost a member (4-8)
  0-3 train
  4 comes; wait 0.2; 5 comes; wait 0.1
  3 killed -> broken 1 for 0 1 2: worker 3 killed: SIGKILL
  4 5 cut; 0 1 2 ask step 1 broken; 6 comes; wait 0.4 -> world 2: 0 1 2 6

a member without session is given up once a survivor finds the world broken (2-4)
  0 1 2 train
  1 cut; wait 1 -> nothing
  0 asks step 5 broken: peer closed -> broken 1 for 2
  2 asks step 5 broken -> world 2: 0 2; why_changed = worker 1 lost its connection
  1 killed -> why_changed = worker 1 killed: SIGKILL; worker_left reason = killed: SIGKILL; worker_left code = -9
a member that reconnects is told what it missed (2-4)
  0 1 train
  1 cut; 1 connects world 0 -> world 1: 0 1 again for 1
  2 comes; wait 0.4; 1 cut
  1 connects -> change 1 for 1: worker 2 joins

ranks go by state then step then old rank then id (2-6)
  0 1 2 train
  3 comes; wait 0.4
  0 asks stateless step 0; 2 asks step 8; 1 asks step 7 -> world 2: 2 1 0 3
of two at one step the one of the later world leads (1-2)
  0 1 train
  0 cut; 1 asks step 4 broken -> world 2: 1
  0 connects world 0; 0 asks left 1 step 5 broken synced 1; 1 asks left 2 step 5 synced 2
      -> change 2 for 1: worker 0 joins; world 3: 1 0
one that has left a later world than is known comes into a later one still (2-4)
  0 1 train
  0 asks left 2 step 9 broken -> broken 1 for 1: worker 0: left the world
  1 asks step 5 -> world 3: 0 1

after a member has finished no newcomer is let in but survivors form a world however few (2-4)
  0 1 2 train
  3 comes -> change 1 for 0 1 2: worker 3 joins
  0 finishes; wait 100 -> nothing
  1 killed; 2 asks step 9 broken -> broken 1 for 2; world 2: 2
of members that are all told to leave the last stays until a newcomer has its state (1-2)
  0 1 train
  0 1 at 7
  0 drains lingering -> change 1 for 1; drain 0; state 0 = draining
  1 drains lingering -> nothing; state 1 = member
  1 asks -> world 2: 1
  0 clean; 2 comes; wait 0.4; 1 asks -> change 2 for 1; world 3: 1 2
  2 at 7; 2 drains lingering; wait 1 -> nothing; state 2 = member
  3 comes; wait 0.4; 1 2 ask -> change 3 for 1 2; world 4: 1 2 3
  3 at 8; 3 drains; wait 1 -> change 4 for 1 2
  1 2 ask; 3 clean; 4 comes; wait 0.4; 1 2 ask -> world 5: 1 2; change 5 for 1 2; world 6: 1 2 4
  4 at 9; wait 1 -> change 6 for 4; drain 1 2: SIGTERM; state 1 = draining; state 2 = draining

no world without state is formed while the last who has it may be writing it (1-4)
  0 trains
  0 drains; 1 comes; wait 20 -> nothing; reason = waits for a worker that leaves: it may be writing the state
  0 clean -> world 2: 1
one that leaves and is ahead of all who are ready may have finished and is waited for (1-2)
  0 1 train
  1 cut; 0 asks step 5 broken -> world 2: 0
  0 drains; 1 connects -> broken 1 for 1: the others went on while it was cut off
  1 asks step 5 broken -> nothing; reason = waits for a worker that leaves: it may have finished
  0 finishes -> reason = training is complete
no world without state is formed before one that was cut off with it is given up (1-4, heartbeat_timeout=2)
  0 1 train
  2 comes; 0 cut; 1 killed -> nothing; reason = waits for a worker that was cut off: it may have the state
  wait 1.8 -> read 0
  wait 0.4 -> kill 0: no connection for 2 s; world 2: 2

the job is complete when all that are left have finished (2-4)
  0 1 2 train
  0 1 finish -> nothing; phase = running
  2 killed -> reason = training is complete

no deadline runs while the state can not be saved (1-4, stop_grace=3, progress_timeout=4)
  0 1 train
  1 drains; stalled: the store is down; wait 20; saved; wait 1 -> state 0 = member; state 1 = draining
  wait 2.5 -> broken 1 for 0; kill 1: had not left 3 s after it was to
the end of a job has its grace once the state is saved (1-4, stop_grace=3)
  0 trains
  stop: enough; stalled: the store is down; wait 20; saved; wait 2 -> stop with checkpoint 0: enough; kill 1 2 3: enough
  wait 2 -> kill 0 1 2 3: had not left 3 s after it was to
who is no member has made no step (2-3)
  0 1 train
  0 steps 1 2; 2 connects
  2 7 step 90 of 90; 2 7 step 90 of 90 -> step = 2; total_steps = 1000
  1 steps 3 -> step = 3
"""


@pytest.mark.parametrize("story", told_in(WORLDS))
def test_worlds(story):
    tell(story, hides="launch")
