"""The job as a whole: from its start to its end, and what is said of it meanwhile."""

import pytest
from play_kit import tell

from tests.stories import told_in

JOBS = """
workers of a training that goes on are counted on, so each worker of its journal has a number of its own (2-3, first_worker=7)
  tick -> launch 7 8 9: asked for
the journal tells where a worker was started (1-2)
  tick; 0 placed on node-a in pod-0; 1 placed -> worker_started host = node-a, h; worker_started place = pod-0, -
a worker that is not ready says what it waits for (2-3)
  tick; 0 1 2 connect; 1 wait_at 5: zoo/slow.py:20 in dataset; wait 1
      -> remark 1 = has waited for 5 s at zoo/slow.py:20 in dataset
  1 asks; 1 wait_at 5: zoo/slow.py:20 in dataset -> remark 1 =; worker_waits worker = 1
a job that insists on its workers says how it would go on and does so at once (2-2, job_name=digits)
  0 1 train
  1 killed; 0 asks broken -> phase = waiting;
      reason = 1 of at least 2 workers ready... `elasticdl scale digits 1-2` goes on with fewer
  scale 1-2 -> world 2: 0; launch 2; phase = running; reason =
whoever asks a job that waits for more workers does not make it wait longer (2-2)
  0 1 train
  1 killed; 0 asks broken; scale 3 -> scale_requested workers = 2-3
  2 comes; wait 1 -> phase = running
  scale 3 -> limits = 3
a master that was held up blames nobody (2-3)
  0 1 2 train
  wait 1; jump 60; tick; wait 1 -> nothing
a worker that hangs at its start shows its stacks and is killed (1-2, start_timeout=20)
  tick; 1 pend: no slot; 0 connects; wait 19 -> launch 0 1
  wait 2.2 -> dump 0; kill 0: not ready 20 s after its start;
      launch 2: in place of another: worker 0: not ready 20 s after its start
  -> warning message = worker 0: not ready 20 s after its start... its stacks are in its log
  0 deleted -> worker_left cause = crashed; worker_left reason = not ready 20 s after its start

the user's error ends the job once with its traceback (2-3)
  0 1 2 train
  1 fails trained: ValueError: no -> broken 1 for 0 2; stop 0 2: ValueError: no
  2 fails trained: another -> nothing
  1 crashed; 0 clean -> nothing
  2 clean -> end failed: ValueError: no | Why
a worker that cannot go on is replaced (2-3)
  0 1 2 train
  1 fails itself trained: out of memory -> broken 1 for 0 2: worker 1 failed: out of memory; phase = running
  1 crashed -> nothing
  wait 2 -> launch 3
a crash loop at the start fails the job and shows the output (1-1)
  for CAUSE in crashed, out_of_memory
  tick; 0 CAUSE: x; wait 5; 1 CAUSE: x; wait 5 -> phase = pending
  2 CAUSE: x -> end failed: 3 workers in a row failed at the start, last worker 2: ...: x | the last lines
a launcher that can never start anything fails the job with its line (2-3)
  tick; launcher fails: no such claim: data -> launch 0 1 2; kill 0 1 2: no such claim: data
  0 1 2 killed -> end failed: no such claim: data

stop gives a grace period and then kills (2-3)
  0 1 2 train
  stop: enough -> stop with checkpoint 0 1 2: enough
  0 clean; wait 29 -> nothing; worker_left cause = drained
  wait 2 -> kill 1 2: had not left 30 s after it was to
  1 killed -> broken 1 for 2
  2 killed -> end stopped: enough
a process that cannot be killed does not hold up the end (1-1)
  0 trains
  stop: enough; wait 62 -> stop with checkpoint 0; kill 0; end stopped: enough

the only worker waits for its replacement unless there is no place for one (1-1)
  0 trains
  0 drains lingering; wait 5 -> launch 1
  1 pend: every GPU is taken (1) -> drain 0: no replacement has a place
of pods that can leave the state nowhere the last stays though no replacement has a place (1-1, image=job:1)
  0 trains
  0 drains lingering; 1 pend: no node -> launch 1
of pods that can leave it somewhere the last leaves (1-1, image=job:1, checkpoint_dir=s3://b)
  0 trains
  0 drains lingering; 1 pend: no node -> launch 1; drain 0

programs that never use the library do not succeed (2-3, own_program)
  tick; 0 1 placed; 2 pend: no slot -> phase = running
  0 clean; 1 2 killed -> terminate 1; kill 2; end failed: worker 0 ended with exit code 0 and took no part in the job...
one that finished before rank 0 was lost is replaced too however long it takes to end (2-2, own_program)
  0 1 train
  1 finishes; 1 cut; 0 killed; wait 3 -> launch 2; launch 3
  1 clean -> nothing; worker_left cause = killed, drained
  2 3 come -> phase = running
of the users own program it is told that it does not connect or end and it is let be (2-3, own_program, start_timeout=20)
  tick; 0 1 connect; 2 placed; 0 1 ask; wait 21 -> launch 0 1 2; world 1: 0 1; read 2
  2 seen: its process runs; wait 0.1 -> remark 2 = not connected for 21 s, its process runs
  0 1 finish; 1 cut; 2 killed; 0 clean; wait 21 -> read 1
  1 seen 90; wait 1000 -> nothing; worker_stuck why = not connected, runs on after its training
  -> worker_stuck worker = 2, 1; worker_stuck standing = its process runs, at /job/train.py:90 in load

a job none of whose workers has a place says what they wait for until one starts (2-3)
  tick -> reason = workers are starting
  0 1 2 pend: every GPU is taken (2) -> phase = pending; reason = every GPU is taken (2); shown 2 = pending
  1 placed -> reason = workers are starting
"""


@pytest.mark.parametrize("story", told_in(JOBS))
def test_jobs(story):
    tell(story)
