"""Sessions with the command line: what there is, what is typed, what is shown, and the exit code. `cli_kit` says how to read them."""

from __future__ import annotations

import pytest
from cli_kit import play, scene_in, sessions

from elasticdl.cli import folder_job
from elasticdl.cli.commands import jobs as commands
from elasticdl.cli.folder_job import SlurmJob


@pytest.fixture
def scene(tmp_path, monkeypatch):
    with scene_in(tmp_path, monkeypatch) as made:
        yield made


LOOKING = r"""
# jobs are listed and shown
+ ended done reason="training is complete" metrics='{"accuracy": 0.5}' + aged done 3000 + lost gone + aged gone 2000
+ runs live + aged live 1000
$ status
> job ...
> done ...succeeded ...training is complete
> gone ...lost ...its master died without saving a final status
> live ...running ... 3/10 ...
$ list  > job ...  > done ...  > gone ...  > live ...
$ status live  > job live: running  > ...step 3/10...  > files: HOME/jobs/live
$ status done
> job done: succeeded: training is complete
> ...step 7/7...
> metrics: accuracy 0.5
> files: HOME/jobs/done
# a status is for programs, or followed
+ ended done
$ status done --json  > {"job_name": "done", "phase": "succeeded", ..."workers": []...}
$ status done --json -f  ! status has --json or --follow; `elasticdl events --json --follow` tells programs what happens
# a name that is mistyped
+ ended brave-otter-42 + aged brave-otter-42 1000 + ended calm-swan-10
$ status brave-oter-42  ! there is no job brave-oter-42: did you mean brave-otter-42? (newest jobs: calm-swan-10, brave-otter-42)
# a job of this machine is deleted once it is over
+ runs live + ended done
$ delete live  ! job live is not over: `elasticdl stop live` ends it
$ delete done  > job done deleted, with its folder HOME/jobs/done
$ delete done  ! on this machine there is no job done; no cluster is configured...
$ list  > job ...  > live ...
# of a lost job the step and the age are told that its journal tells
+ lost gone
+ file jobs/gone/journal.jsonl {"time": 100.0, "event": "job_started"}\n{"time": 2099.0, "event": "steps", "step": 19990, "steps": 10}\n
+ file jobs/gone/journal.jsonl {"time": 3000.0, "event": "worker_stuck"}\n{"half
$ status gone
> job gone: lost: its master died without saving a final status
> epoch -, step 19,990, elapsed 0:48:20
> files: HOME/jobs/gone
# a master that does not answer is one line
+ deaf one
$ scale one 2  ! the master at 127.0.0.1:1 (process ...) is not reached: the connection is refused...  ? 1
$ status  > ...  > one ...unreachable ...
# events for people
+ ended done
+ file jobs/done/journal.jsonl {"number": 1, "time": 1000.5, "event": "phase", "phase": "running", "reason": ""}\n
+ file jobs/done/journal.jsonl garbage{\n"text"\n{"time": NaN, "event": "phase"}\n
+ file jobs/done/journal.jsonl {"number": 2, "time": 1001.25, "event": "evaluation", "step": 5, "metrics": {"a": 0.987654321}, "world": [0]}\n
$ events done
> ...:40.500  phase             phase=running  reason=
> ...:41.250  evaluation        step=5  metrics={a: 0.987654}  world=[0]
$ events done --follow  > ...:40.500  phase ...  > ...:41.250  evaluation ...
$ events done --json
> {"number": 1, "time": 1000.5, "event": "phase", "phase": "running", "reason": ""}
> {"number": 2, "time": 1001.25, "event": "evaluation", "step": 5, "metrics": {"a": 0.987654321}, "world": [0]}
# logs are interleaved by time under their writers' names
+ ended done + file jobs/done/logs/master.log 2026-01-01 00:00:01,000 start\n2026-01-01 00:00:04,000 end\n
+ file jobs/done/logs/worker-0.log 2026-01-01 00:00:02,000 zero\nTraceback\n
+ file jobs/done/logs/worker-10.log 2026-01-01 00:00:03,000 ten\nunfinished
$ logs done
> master    | 2026-01-01 00:00:01,000 start
> worker-0  | 2026-01-01 00:00:02,000 zero
> worker-0  | Traceback
> worker-10 | 2026-01-01 00:00:03,000 ten
> master    | 2026-01-01 00:00:04,000 end
> worker-10 | unfinished
$ logs done --worker 0  > 2026-01-01 00:00:02,000 zero  > Traceback
$ logs done --worker 7  ! job done has no worker 7; it has logs of master, worker-0, worker-10
# logs of which there are none say so
+ runs live
$ logs live  !! job live has no logs: nothing was printed yet
"""

ASKING = r"""
# the only running job need not be named
+ runs live + ended done
$ scale 2-4  > from 2 to 4 workers  = scale 2-4
$ scale live 3  > from 3 to 3 workers  = scale 3-3
$ scale live 9  ! this machine has 8 slots  = scale 9-9
$ scale live 0  ! '0' is not a number of workers: write N or MIN-MAX, as in 3 or 2-4, from 1 to 10000
$ scale live 1-1000000000  ! '1-1000000000' is not a number of workers: write N or MIN-MAX, as in 3 or 2-4, from 1 to 10000
+ deaf other
$ scale 3  ! 2 jobs are running, so name one: ...
# no running job to choose
+ ended done
$ stop  ! no job is running; name one to look at an old one (newest jobs: done)
$ scale done 3  ! job done is not running: it has succeeded
# a job that does not stop is not waited for forever, also one of a newer version, whose options may be others
+ runs live + gone jobs/live/job.json + file jobs/live/job.json {"job_name": "live", "of_next_year": 1, "stop_grace": 0.1}
$ stop live  ! job live has not ended ...`elasticdl stop live --now` ends it at once...  ? 1  = stop checkpoint
# a specification that makes no sense is one line before anything is stopped
+ runs live + gone jobs/live/job.json
+ file jobs/live/job.json {"stop_grace": "never"}
$ stop live  ! job live was made by another version, or its specification is damaged: ...
"""

STOPPING = "\n".join(
    f"""
# stop waits until the job has ended{flag}
+ runs live + obeys live file jobs/live/status.json {{"jobName": "live", "phase": "stopped", "step": "4"}}
$ stop{flag}  > job live stopped at step 4  = stop{told}
"""
    for flag, told in (("", " checkpoint"), (" --now", " now"), (" --no_checkpoint", ""))
)

FOLLOWING = r"""
# a status that is followed shows the course of the job, and how it ended, of which the stream has told nothing
+ runs live
+ watched live file jobs/live/journal.jsonl {"number": 1, "time": 1, "event": "warning", "message": "late"}\n
+ watched live file jobs/live/status.json {"phase": "succeeded", "step": "100", "elapsed": 9, "jobName": "live"}; ends live
$ status -f
! ...
! warning: late
! ...
! job live succeeded: 100 steps, 0:00:09
!   training never paused
# whoever follows a job to its end is told it though nothing could be written
+ runs live + watched live says live phase=failed reason="out of luck"; lost live; ends live
$ status --follow live  !! ...  ! job live failed: out of luck; ...  ? 1
# whoever only looks on goes with Ctrl-C, and the job goes on
+ runs live + watched live interrupted
$ status --follow live  ? 130
# events are followed to the end of the job
+ runs live + watched live file jobs/live/journal.jsonl {"number": 1, "time": 2, "event": "job_finished"}\n
+ watched live file jobs/live/status.json {}; ends live
$ events -f --json  > {"number": 1, "time": 2, "event": "job_finished"}
# whoever follows a job that has not succeeded is told by the exit code
+ ended bad phase=failed reason="out of luck" + ended cut phase=stopped + lost gone
$ status --follow bad  !! ...  ! job bad failed: out of luck; all logs: HOME/jobs/bad/logs  ? 1
$ status --follow gone
! ...
! elasticdl status: job gone lost: its master died without saving a final status; all logs: HOME/jobs/gone/logs
? 1
$ status --follow cut  !! ...  ! job cut was stopped  ? 1
# a stopped job that could not write how it ended is told, as on a full disk, where what was trained is not kept either
+ runs live + obeys live gone jobs/live/master.json; aged live 1000
$ stop live  ! job live is over, and has not said how it ended: its master died without saving a final status  ? 1
= stop checkpoint
"""

DAMAGED = "\n".join(
    rf"""
# a file that can not be read is one line, and hides no other job: {name}
+ ended good + new bad + folder jobs/bad/{name}
$ report bad  ! HOME/jobs/bad/{name} can't be used: Is a directory  ? 1
$ status  > ...  > bad ...  > ...
"""
    for name in ("status.json", "master.json", "journal.jsonl")
) + "\n".join(
    rf"""
# a damaged status is one line: {damaged}
+ new bad + file jobs/bad/status.json {damaged}
$ status bad  ! the last status of job bad is damaged: ...  ? 1
$ status bad --follow  ! the last status of job bad is damaged: ...  ? 1
$ status --json  > ..."phase": "unreachable"...
"""
    for damaged in ('{"phase"', '{"phase": 3}', r"\xff")
)

CLUSTER = r"""
# a kubeconfig that is none, or not there, is one line
$ status x --namespace y  ! no cluster is configured: there is no kubeconfig HOME/config; KUBECONFIG can name another
+ kubeconfig {{{
$ train --image i --model_def m  ! the kubeconfig HOME/config can't be read: while parsing ...
$ status digits  ! on this machine there is no job digits (there are none on this machine); the kubeconfig HOME/config...
# all jobs are those of the cluster as well, and one line if they can not be had
+ kubeconfig
$ status  > there are no jobs  !! warning: the cluster's jobs are missing: the cluster at https://127.0.0.1:9 does not...
+ cluster digits
$ status  > job ...namespace ...phase ...  > digits ...default ...lost ...
$ status digit  ! on this machine there is no job digit ...; there is no job digit in namespace default: did you mean digits?
# a job of a cluster is found where it is, also before it has a pod
+ kubeconfig + cluster digits found
$ status digits --namespace lab  > job digits: starting: its master's pod is not there yet  > ...
"""

SLURM = r"""
# a job whose master waits is stopped
+ batch mine + program squeue echo 'PENDING|Resources'
$ stop mine  > job mine stopped before it had begun
= scancel --quiet 7
= scancel --quiet --me --name=elasticdl-mine-7-worker
$ status mine  > job mine: stopped: elasticdl stop  > ...
# what is trained is not given up while the next master waits
+ batch mine + program squeue echo 'PENDING|None'
+ file jobs/mine/journal.jsonl {"time": 1.0, "event": "steps", "step": 5}\n
$ stop mine  ! job mine has no master at the moment: its master waits in Slurm's queue; `elasticdl status mine` tells when it has
$ stop mine --now  > job mine stopped at step 5  = scancel --quiet 7  = scancel --quiet --me --name=elasticdl-mine-7-worker
# the workers of a lost job are ended
+ batch mine + program squeue case "$*" in *--name=*) echo 8;; *) echo "FAILED|None";; esac
$ stop mine  > job mine is lost, as its master died: its workers are ended, and the same command begins anew
= scancel --quiet --me --name=elasticdl-mine-7-worker
# a master may answer though Slurm does not
+ batch mine + program squeue echo 'Unable to contact slurm controller' >&2; exit 1
+ file jobs/mine/master.json {"address": "127.0.0.1:1", "token": "", "pid": 1}
$ stop mine  !! ...127.0.0.1:1...  ? 1
# what could not be cancelled is to be tried again
+ batch mine + program squeue echo 'PENDING|Resources'
+ program scancel echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1
$ stop mine  !! ...the job may still run: try again once `squeue` answers  ? 1  = scancel --quiet 7
$ status mine  > job mine: starting: its master waits in Slurm's queue: Resources  > ...
# whoever looks on is told why there is no master, and by the exit code that the job is lost
+ batch mine
+ program squeue [ $(/usr/bin/wc -l < HOME/called) -gt 40 ] && echo "FAILED|None" || echo "PENDING|Resources"
$ status mine --follow
! its master waits in Slurm's queue: Resources
! elasticdl status: job mine lost: its master died without saving a final status; all logs: HOME/jobs/mine/logs
? 1
"""

ZOO = r"""
# docker comes first, without a program nothing is done, and its failure is told
$ zoo push a  ! neither docker nor buildah is here: install one of them...
+ program buildah
$ zoo push a  !! HOME/bin/buildah push a  = buildah push a
+ program docker exit 3
$ zoo push a  !! HOME/bin/docker push a  ! `docker push` ended with 3; see above why  ? 1  = docker push a
# what is built is the folder, with the Dockerfile that was made for it
+ program docker + folder zoo
$ zoo build zoo --image a  ! ...elasticdl zoo init zoo...
+ file zoo/Dockerfile FROM a
$ zoo build zoo --image a  !! HOME/bin/docker build ...  = docker build --tag a --file zoo/Dockerfile zoo
# the Dockerfile of a zoo is written again as it is, also with packages and another image, and no other is overwritten
+ folder zoo + file zoo/cnn.py
$ zoo init zoo  > zoo/Dockerfile is written; next: elasticdl zoo build zoo --image IMAGE
+ holds zoo/Dockerfile # Made by ...\nFROM elasticdl:...-cpu\n\nUSER root\nCOPY --chown=1000:1000 . /model_zoo\n\nWORKDIR /model_zoo\nUSER 1000:1000\n
$ zoo init --model_zoo=zoo  > zoo/Dockerfile is written; next: elasticdl zoo build zoo --image IMAGE
+ file zoo/requirements.txt scikit-learn==1.9.1\n
$ zoo init zoo --base_image=a:1  ! zoo/Dockerfile is there and differs from what would be written: remove it first, or keep it
+ gone zoo/Dockerfile
$ zoo init zoo --base_image=a:1  > zoo/Dockerfile is written; ...
+ holds zoo/Dockerfile ...FROM a:1\n...COPY requirements.txt /requirements/\nRUN pip install --no-cache-dir -r /requirements/requirements.txt\n...
"""


@pytest.mark.parametrize("session", sessions(LOOKING + ASKING + STOPPING + FOLLOWING + DAMAGED + CLUSTER + ZOO))
def test_a_session(session, scene, capfd, monkeypatch):
    monkeypatch.setattr(commands, "CLOSING_TIME", 0.0)
    play(session, scene, capfd)


@pytest.mark.parametrize("session", sessions(SLURM))
def test_a_session_with_slurm(session, scene, capfd, monkeypatch):
    monkeypatch.setattr(folder_job, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(SlurmJob, "look_seconds", 0.0)
    for name in ("sbatch", "scancel"):
        scene.program(name)
    play(session, scene, capfd)
