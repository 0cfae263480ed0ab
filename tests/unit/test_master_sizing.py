"""A job that knows how it scales: what it says, how many workers it asks for, and what of that outlives it."""

import pytest
from play_kit import tell

from elasticdl.master.shell.calls import to_status
from tests.stories import told_in

# `learn 0.9`: each member does that part of what one does alone in a second. Workers do by themselves what they are told to.
SIZES = """
of one number of workers nothing of others is known (2-2, scale_policy=all)
  wait 5; learn 0.9 -> ...; advice curve = []
  -> advice text = only 2 workers were measured, so what fewer or more would do is not known
what was measured is said again only when it changes, and not often (1-2, scale_policy=all)
  wait 5; scale 1; wait 5; learn 1 -> ...; advice = 0
  scale 2; wait 5; learn 0.9 -> ...; advice curve = ...{'workers': 2, 'speedup': 1.8, 'measured': True}...
  -> advice text = 2 workers do 1.8 times the work of one (each does 0.90 of one worker, measured)... one more ...
  wait 40; learn 0.88 count 200; wait 60 -> advice = 1; size advice = ...each does 0.88...
  learn 0.7 count 200; wait 60 -> advice = 2; advice text = 2 workers do 1.8 ..., 2 workers do 1.4 ...
it looks seldom and at once when the range is another (2-2, scale_policy=all)
  wait 5; take 0.5; wait 3 -> size advice =
  wait 2 -> size advice = only 2 workers were measured...; advice = 1
  wait 200; take 1 count 200; wait 1 -> advice = 1
  scale 1-2; wait 1 -> advice = 2

it grows as long as that pays and goes back if not (1-8)
  wait 5; learn 1; learn 0.75; learn 0.5 -> ...; sizes = 1 2 3 2; decision workers = 2, 3, 2
  -> decision reason = ..., goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6
  -> worker_draining reason = goes back to 2: of 3 workers each does 0.50 of what one does alone, less than --min_efficiency 0.6
  learn 0.75 -> ...; size decision = stays at 2: of 3 workers each did 0.50...
as long as there is no place it asks for no more (1-8)
  wait 5; take 1; jump 1; tick; jump 1; tick; jump 1; tick; jump 1; tick; jump 1; tick -> ...; launch 1
  1 nowhere: no place; learn 1 -> nothing; size target = 2
the users range is kept and a reason of another range is not shown (1-8)
  wait 5; scale 3-4; wait 5; learn 0.99; learn 0.99 -> ...; sizes = 1 3 4;
      size decision = stays at 4: --num_workers allows no more
  scale 1-2; wait 5 -> ...; sizes = ... 2; decision reason = ..., goes to 2: the job was scaled to 1-2
  scale 1-4 -> nothing; size decision = stays at 2: the job was scaled to 1-4, and nothing was measured since
  scale 1 -> ...; decision workers = ..., 1; decision reason = ..., goes to 1: the job was scaled to 1

another master goes on with the target and measures anew (1-8)
  wait 5; learn 1; learn 0.9; die; rise; wait 10 -> ...; sizes = 1 2 4; size target = 4; size advice =
  learn 0.9 -> ...; size decision = tries 5: how the job scales is not known yet
another master that begins with the most workers finds out whether they pay (1-2)
  wait 5; learn 1; die; rise; wait 10; learn 0.5 -> ...; members = 0; decision workers = ..., 1
  learn 1 -> size target = 1; size decision = stays at 1: ...
"""


@pytest.mark.parametrize("story", told_in(SIZES))
def test_sizes(story):
    play = tell(story, obedient=True, scale_policy="efficiency", min_efficiency=0.6)
    status = to_status("job", play.job, play.now, 1.0)
    assert (status.advice, status.decision) == (play.fact("size advice"), play.fact("size decision"))
