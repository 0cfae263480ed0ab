"""The commands that look at jobs and talk to their masters: status, scale, logs, events, stop."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from cli_fake_jobs import ended_job, new_job, run
from cli_fake_master import DEADLINE, TOKEN, FakeMaster, serving
from google.protobuf import json_format

from elasticdl.cli import folder_run
from elasticdl.cli.folder_job import KEPT_STATES, FolderJob, Life, handle_of, prune_jobs
from elasticdl.cli.follow import Prints, show_entry
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.cli.screens import Once
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root, kept_states, list_jobs, write_aside
from elasticdl.job.journal import Seldom, read_journal
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb

LOST = "its master died without saving a final status"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def running():
    """A job named `live` whose master is in this process."""
    job, master = new_job("live"), FakeMaster("live")
    master.update(phase="running", step=3, total_steps=10)
    with serving(master) as address:
        address.write(job.master)
        yield master


def test_the_life_of_a_job(dead_pid):
    job = new_job("one")
    assert handle_of(job).life() is Life.STARTING
    os.utime(job.path, (1e9, 1e9))
    assert handle_of(job).life() is Life.LOST, "its start was cut off long ago"
    write_aside(job.starter, json.dumps({"address": "", "token": "", "pid": dead_pid}))
    assert handle_of(job).life() is Life.LOST
    MasterAddress.of_this_process().write(job.starter)
    os.utime(job.path, (1e9, 1e9))
    assert handle_of(job).life() is Life.STARTING, "its check takes long"
    MasterAddress("127.0.0.1:1", TOKEN, os.getpid()).write(job.master)
    assert handle_of(job).life() is Life.RUNNING
    job.starter.unlink()
    MasterAddress("127.0.0.1:1", TOKEN, dead_pid).write(job.master)
    assert handle_of(job).life() is Life.LOST
    MasterAddress.of_this_process("127.0.0.1:1", TOKEN).write(job.master)
    assert handle_of(job).life() is Life.RUNNING
    made_up = [json.dumps({"address": "127.0.0.1:1", "token": TOKEN, "pid": pid}) for pid in ("1", 0, -1, 10**30)]
    for damaged in ("{", "[]", '{"address": "127.0.0.1:1", "of_next_year": 1}', *made_up):
        job.master.write_text(damaged)
        os.utime(job.path, (1e9, 1e9))
        assert handle_of(job).life() is Life.LOST
    write_aside(job.status, "{}")
    assert handle_of(job).life() is Life.ENDED


def test_the_job_of_another_machine_that_shares_the_folder_is_not_taken_for_lost(capsys, dead_pid):
    """The process with that number is there, and can't be seen from here."""
    job = new_job("one")
    MasterAddress("127.0.0.1:1", TOKEN, dead_pid, host="another").write(job.master)
    assert handle_of(job).life() is Life.RUNNING
    prune_jobs(keep=0)
    assert job.path.exists()
    code, _, err = run(capsys, "status", "one")
    assert (code, f"(process {dead_pid} on another)" in err) == (1, True), err


def test_a_process_that_got_the_number_of_a_dead_master_is_not_the_master(capsys):
    job = new_job("one")
    another = {"address": "127.0.0.1:1", "token": TOKEN, "pid": os.getpid(), "started": 1}
    write_aside(job.master, json.dumps(another))
    assert handle_of(job).life() is Life.LOST
    assert run(capsys, "stop", "one") == (2, "", f"elasticdl stop: job one is not running: {LOST}\n")


def test_a_job_whose_check_takes_long_is_not_taken_for_lost():
    with folder_run.new_job(JobSpec(job_name="one")) as (job, _):
        os.utime(job.path, (1e9, 1e9))
        assert handle_of(job).life() is Life.STARTING
        with (
            pytest.raises(UserError, match="there is a job named one already"),
            folder_run.new_job(JobSpec(job_name="one")),
        ):
            pass
    assert [path.name for path in job.path.iterdir() if path.is_file()] == ["job.json"]


def test_a_job_that_was_killed_at_its_start_is_lost_also_when_it_has_come_back(dead_pid):
    old = new_job("one")
    write_aside(old.starter, json.dumps({"address": "", "token": "", "pid": dead_pid}))
    with pytest.raises(UserError), folder_run.new_job(JobSpec(job_name="one")):
        raise UserError("something is wrong with the job")
    assert handle_of(old).life() is Life.LOST


def test_a_folder_that_cant_be_looked_at_stays_and_is_in_nobodys_way():
    """As one that another user has made."""
    strange = new_job("strange")
    strange.master.mkdir()
    with folder_run.new_job(JobSpec(job_name="one")):
        pass
    prune_jobs(keep=0)
    with pytest.raises(UserError, match="there is a job named strange already"):
        folder_run.new_job(JobSpec(job_name="strange")).__enter__()
    assert strange.master.is_dir()


def test_where_the_disk_is_full_the_job_that_gave_way_comes_back(monkeypatch):
    old = ended_job("one", phase="stopped")
    (old.path / "stopped-0000000007.state").write_text("the training")
    before = {path.name: path.read_bytes() for path in old.path.iterdir() if path.is_file()}

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(folder_run, "write_aside", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"), folder_run.new_job(JobSpec(job_name="one")):
            pass
    assert {path.name: path.read_bytes() for path in old.path.iterdir() if path.is_file()} == before
    assert [path.name for path in jobs_root().iterdir()] == ["one"]


def test_an_old_job_whose_status_is_damaged_gives_way():
    ended_job("one").status.write_text("{damaged")
    with folder_run.new_job(JobSpec(job_name="one")) as (job, _):
        pass
    assert not job.status.exists()
    assert [path.name for path in jobs_root().iterdir()] == ["one"]


def test_of_two_commands_that_make_a_job_of_one_name_at_once_one_has_it(monkeypatch):
    """What has given way to the first does not give way to the other."""
    old, found, refused, ended = ended_job("one", phase="stopped"), [], [], threading.Event()
    (old.path / "stopped-0000000007.state").write_text("the training")

    def goes_on_slowly(job):
        goes_on = handle_of(job).over() == ""
        time.sleep(0.1)
        return goes_on

    def make():
        try:
            with folder_run.new_job(JobSpec(job_name="one")) as (job, _):
                found.extend(path.name for path in kept_states(job.path))
                ended.wait(DEADLINE)
        except UserError as error:
            refused.append(str(error))
            ended.set()

    monkeypatch.setattr(folder_run, "goes_on", goes_on_slowly)
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["stopped-0000000007.state"]
    assert [text.partition(" already")[0] for text in refused] == ["there is a job named one"]


def test_old_jobs_go_and_running_ones_stay(running):
    for number in range(5):
        moment = 1000.0 + number
        os.utime(ended_job(f"old-{number}").path, (moment, moment))
    prune_jobs(keep=2)
    assert [job.name for job in list_jobs()] == ["live", "old-4", "old-3"]


def test_of_older_jobs_what_their_trainings_were_stopped_with_is_deleted():
    for number in range(KEPT_STATES + 2):
        job = ended_job(f"old-{number}")
        (job.path / "stopped-0000000040.state").touch()
        os.utime(job.path, (1000 + number, 1000 + number))
    prune_jobs()
    kept = [job.name for job in list_jobs() if kept_states(job.path)]
    assert (len(list_jobs()), kept) == (KEPT_STATES + 2, [f"old-{number}" for number in range(KEPT_STATES + 1, 1, -1)])


def test_a_job_of_this_machine_is_deleted_once_it_is_over(capsys, monkeypatch, tmp_path, running):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    told = "elasticdl delete: job live is not over: `elasticdl stop live` ends it\n"
    assert run(capsys, "delete", "live") == (2, "", told)
    job = ended_job("done")
    assert run(capsys, "delete", "done") == (0, f"job done deleted, with its folder {job.path}\n", "")
    assert [each.name for each in list_jobs()] == ["live"]
    code, out, err = run(capsys, "delete", "done")
    assert (code, out) == (2, "")
    assert err.startswith("elasticdl delete: on this machine there is no job done; no cluster is configured")


def test_a_status_for_programs_has_all_its_fields_in_one_line(capsys, running):
    ended_job("done", reason="training is complete", metrics={"accuracy": 0.5})
    code, out, err = run(capsys, "status", "live", "--json")
    found = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (found["job_name"], found["phase"], found["step"], found["workers"]) == ("live", "running", 3, [])
    assert found.keys() == {field.name for field in pb.JobStatus.DESCRIPTOR.fields}
    new_job("damaged").status.write_text("{")
    each = [json.loads(line) for line in run(capsys, "status", "--json")[1].splitlines()]
    assert {one["job_name"]: one["phase"] for one in each} == {
        "live": "running",
        "done": "succeeded",
        "damaged": "unreachable",
    }
    assert run(capsys, "status", "live", "--json", "-f")[0] == 2


def test_the_list_is_the_table_of_status(capsys, running):
    ended_job("done", reason="training is complete")
    table = run(capsys, "status")
    assert sorted(line.split()[0] for line in table[1].splitlines()) == ["done", "job", "live"]
    assert run(capsys, "list") == table


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("elasticdl st", ["status", "stop"]),
        ("elasticdl ", ["train", "run", "status", "list"]),
        ("elasticdl status li", ["live"]),
        ("elasticdl delete li", ["live"]),
        ("elasticdl events --js", ["--json"]),
        ("elasticdl run --num", ["--num_workers"]),
        ("elasticdl wrong --x", []),
        ("elasticdl run --num_workers 2 -- python tr", []),
    ],
)
def test_a_shell_completes_commands_options_and_names(capsys, monkeypatch, running, words, found):
    monkeypatch.setenv("_ELASTICDL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    shown = [line.partition(",")[2] for line in out.split()]
    assert shown[: len(found)] == found
    assert bool(shown) == bool(found)


def test_jobs_are_listed_and_shown(capsys, running, dead_pid):
    ended_job("done", reason="training is complete", metrics={"accuracy": 0.5})
    MasterAddress("127.0.0.1:1", TOKEN, dead_pid).write(new_job("gone").master)
    code, out, err = run(capsys, "status")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    for name, shown in (("live", ("running", "3/10")), ("done", ("succeeded", "is complete")), ("gone", ("lost",))):
        assert all(part in rows[name] for part in shown)
    assert "step 3/10" in run(capsys, "status", "live")[1]
    _, out, _ = run(capsys, "status", "done")
    assert "job done: succeeded" in out
    assert "metrics: accuracy 0.5" in out


def test_a_job_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    ended_job("brave-otter-42")
    ended_job("calm-swan-10")
    code, out, err = run(capsys, "status", "brave-oter-42")
    assert (code, out) == (2, "")
    assert err.startswith(
        "elasticdl status: there is no job brave-oter-42: did you mean brave-otter-42? (newest jobs: "
    )
    assert "calm-swan-10" in err


def test_the_only_running_job_need_not_be_named(capsys, running):
    ended_job("done")
    assert run(capsys, "scale", "2-4") == (0, "from 2 to 4 workers\n", "")
    assert run(capsys, "scale", "live", "3") == (0, "from 3 to 3 workers\n", "")
    assert [(request.min_workers, request.max_workers) for request in running.requests] == [(2, 4), (3, 3)]
    assert run(capsys, "scale", "live", "9") == (2, "", "elasticdl scale: this machine has 8 slots\n")
    MasterAddress("127.0.0.1:1", TOKEN, os.getpid()).write(new_job("other").master)
    code, _, err = run(capsys, "scale", "3")
    assert code == 2
    assert err.startswith("elasticdl scale: 2 jobs are running, so name one: ")


def test_no_running_job_to_choose(capsys):
    ended_job("done")
    told = "elasticdl stop: no job is running; name one to look at an old one (newest jobs: done)\n"
    assert run(capsys, "stop") == (2, "", told)
    assert run(capsys, "scale", "done", "3") == (2, "", "elasticdl scale: job done is not running: it has succeeded\n")


@pytest.mark.parametrize("workers", ["0", "1-1000000000"])
def test_a_wrong_number_of_workers(capsys, running, workers):
    told = f"elasticdl scale: {workers!r} is not a number of workers: write N or MIN-MAX, as in 3 or 2-4, from 1 to 10000\n"
    assert run(capsys, "scale", "live", workers) == (2, "", told)
    assert running.requests == []


def test_a_master_that_does_not_answer_is_one_line(capsys):
    MasterAddress("127.0.0.1:1", TOKEN, os.getpid()).write(new_job("deaf").master)
    code, _, err = run(capsys, "scale", "deaf", "2")
    told = (
        f"elasticdl scale: the master at 127.0.0.1:1 (process {os.getpid()}) is not reached: the connection is refused"
    )
    assert (code, err.startswith(told), err.count("\n")) == (1, True, 1)
    assert "unreachable" in run(capsys, "status")[1]


@pytest.mark.parametrize(
    ("flags", "checkpoint", "now"), [([], True, False), (["--now"], False, True), (["--no-checkpoint"], False, False)]
)
def test_stop_asks_and_waits_until_the_job_has_ended(capsys, running, flags, checkpoint, now):
    def end_when_asked() -> None:
        running.wait_for_requests(1)
        status = pb.JobStatus(job_name="live", phase="stopped", step=4)
        write_aside(jobs_root() / "live" / "status.json", json_format.MessageToJson(status))

    master = threading.Thread(target=end_when_asked)
    master.start()
    assert run(capsys, "stop", *flags) == (0, "job live stopped at step 4\n", "")
    master.join(DEADLINE)
    (request,) = running.requests
    assert (request.checkpoint, request.now) == (checkpoint, now)


def test_a_job_that_does_not_stop_is_not_waited_for_forever_also_one_of_a_newer_version(capsys, monkeypatch, running):
    """Whose options may be others."""
    monkeypatch.setattr("elasticdl.cli.commands.jobs.CLOSING_TIME", 0.0)
    spec = jobs_root() / "live" / "job.json"
    write_aside(spec, json.dumps({**json.loads(spec.read_text()), "of_next_year": 1, "stop_grace": 0.1}))
    handle = FolderJob(JobDir(jobs_root() / "live"))
    assert (handle.spec().job_name, handle.spec().stop_grace) == ("live", 0.1)
    code, _, err = run(capsys, "stop", "live")
    assert (code, "`elasticdl stop live --now` ends it at once" in err) == (1, True)
    assert len(running.requests) == 1


def test_stop_waits_as_long_as_a_master_may_take(capsys, monkeypatch, running):
    """Workers have their grace, those that are killed then as much again; and on a cluster a master closes its places for up to 85 s."""
    patience = []
    monkeypatch.setattr(FolderJob, "wait_until_over", lambda job, seconds: patience.append(seconds))
    spec = jobs_root() / "live" / "job.json"
    write_aside(spec, json.dumps({**json.loads(spec.read_text()), "stop_grace": 100.0}))
    run(capsys, "stop", "live")
    assert patience[0] > 2 * 100.0 + 85.0


def test_logs_of_which_there_are_none_say_so(capsys, running):
    assert run(capsys, "logs", "live") == (0, "", "job live has no logs: nothing was printed yet\n")


@pytest.mark.parametrize("text", ['{"stop_grace": "never"}', "{", "[]", None])
def test_a_specification_that_makes_no_sense_is_one_line_before_anything_is_stopped(capsys, running, text):
    spec = jobs_root() / "live" / "job.json"
    spec.unlink() if text is None else write_aside(spec, text)
    code, out, err = run(capsys, "stop", "live")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("elasticdl stop: job live was made by another version, or its specification is damaged: ")
    assert running.requests == []


JOURNAL = [
    {"number": 1, "time": 1000.5, "event": "phase", "phase": "running", "reason": ""},
    {
        "number": 2,
        "time": 1001.25,
        "event": "evaluation",
        "step": 5,
        "metrics": {"accuracy": 0.987654321},
        "world": [0, 1],
    },
]


def write_journal(job: JobDir) -> None:
    job.journal.write_text("".join(json.dumps(entry) + "\n" for entry in JOURNAL))


def test_events_for_people(capsys):
    write_journal(ended_job("done"))
    first, second = run(capsys, "events", "done")[1].splitlines()
    assert first.endswith("  phase             phase=running  reason=")
    assert second.endswith("  evaluation        step=5  metrics={accuracy: 0.987654}  world=[0, 1]")
    assert second.split()[1].endswith(":41.250")


@pytest.mark.parametrize("rubbish", ["garbage{", '"text"', "[" * 100_000, '{"time": NaN, "event": "phase"}'])
def test_what_is_no_entry_is_left_out(capsys, rubbish):
    job = ended_job("done")
    write_journal(job)
    with job.journal.open("a") as journal:
        journal.write(f"\n{rubbish}\n")
    for flags in ((), ("--json",), ("--follow",), ("--json", "--follow")):
        code, out, err = run(capsys, "events", "done", *flags)
        assert (code, len(out.splitlines()), err) == (0, 2, "")
    assert len(list(read_journal(job.journal))) == 2


def test_who_watches_a_job_is_not_ended_by_what_stands_in_its_journal():
    told = []
    screen = types.SimpleNamespace(line=told.append, draws=lambda stream: False)
    prints = Prints((0,), screen, PodPrinters(None, "one"))
    events = ('"world_formed", "world": 1, "members": 3', '"world_formed"', '"worker_started"', '"worker_slow"')
    wrong = ["garbage{", *(f'{{"time": 1, "event": {event}}}' for event in events)]
    right = '{"time": 1, "event": "warning", "message": "late"}'
    for line in (*wrong, right):
        show_entry(line, screen, Once(), Seldom(), prints.hear)
    assert told[-1] == "warning: late"


def test_a_stopped_job_that_could_not_write_how_it_ended_is_told(capsys, running, monkeypatch):
    """As on a full disk, where what was trained is not kept either."""

    def lose_all(job, timeout):
        job.folder.master.unlink()
        os.utime(job.folder.path, (1e9, 1e9))

    monkeypatch.setattr(FolderJob, "wait_until_over", lose_all)
    told = f"elasticdl stop: job live is over, and has not said how it ended: {LOST}\n"
    assert run(capsys, "stop", "live") == (1, "", told)


def test_of_a_lost_job_the_step_and_the_age_are_told_that_its_journal_tells(capsys, dead_pid):
    job = new_job("gone")
    MasterAddress("127.0.0.1:1", TOKEN, dead_pid).write(job.master)
    steps = [{"time": 100.0 + n, "event": "steps", "step": 10 * n, "steps": 10} for n in range(1, 2000)]
    entries = [{"time": 100.0, "event": "job_started"}, *steps, {"time": 3000.0, "event": "worker_stuck"}]
    job.journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"half')
    assert "\nepoch -, step 19,990, elapsed 0:48:20\n" in run(capsys, "status", "gone")[1]


def test_whoever_follows_a_job_to_its_end_is_told_it_though_nothing_could_be_written(capsys, running, dead_pid):
    def end_on_a_full_disk() -> None:
        running.wait_for_watcher()
        running.update(phase="failed", reason="out of luck")
        MasterAddress("127.0.0.1:1", TOKEN, dead_pid).write(JobDir(jobs_root() / "live").master)
        running.end()

    thread = threading.Thread(target=end_on_a_full_disk)
    thread.start()
    code, _, err = run(capsys, "status", "--follow", "live")
    thread.join()
    assert (code, err.splitlines()[-1].partition(";")[0]) == (1, "elasticdl status: job live failed: out of luck")


def test_following_events_and_logs_ends_with_the_job(running):
    job = JobDir(jobs_root() / "live")
    write_journal(job)
    job.master_log.write_text("first\n")
    command, settings = [sys.executable, "-m", "elasticdl.cli"], {"stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, "events", "-f", "--json"], **settings) as events,
        subprocess.Popen([*command, "logs", "live", "--follow"], **settings) as logs,
    ):
        assert [json.loads(events.stdout.readline()) for _ in JOURNAL] == JOURNAL
        assert logs.stdout.readline() == "master    | first\n"
        with job.journal.open("a") as journal:
            journal.write('{"number": 3, "time": 2, "event": "job_finished"}\n')
        job.worker_log(4).write_text("hello\n")
        assert json.loads(events.stdout.readline())["event"] == "job_finished"
        assert logs.stdout.readline() == "worker-4  | hello\n"
        write_aside(job.status, "{}")
        assert (events.wait(DEADLINE), logs.wait(DEADLINE)) == (0, 0)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    job = ended_job("done")
    job.journal.write_text('{"time": 1, "event": "warning", "message": "much"}\n' * 20_000)
    command = f"{sys.executable} -m elasticdl.cli events done | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["status"], ["list"], ["status", "done"]])
def test_what_nobody_reads_ends_with_the_code_of_a_broken_pipe(words):
    ended_job("done")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "elasticdl.cli", *words], stdout=stdout, stderr=subprocess.PIPE, timeout=DEADLINE
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_following_a_status_shows_the_course_of_the_job_and_how_it_ended(running):
    """The stream of statuses has told nothing of the last ones: they come from what was kept."""
    job = JobDir(jobs_root() / "live")
    command = [sys.executable, "-m", "elasticdl.cli", "status", "-f"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        running.wait_for_watcher()
        job.journal.write_text('{"number": 1, "time": 1, "event": "warning", "message": "late"}\n')
        assert process.stderr.readline() == "warning: late\n"
        last = pb.JobStatus(job_name="live", phase="succeeded", step=100, total_steps=100, elapsed=9)
        write_aside(job.status, json_format.MessageToJson(last))
        running.end()
        rest = process.stderr.read()
        assert process.wait(DEADLINE) == 0
    *_, ended, paused = rest.splitlines()
    assert (ended, paused) == ("job live succeeded: 100 steps, 0:00:09", "  training never paused")


def test_whoever_follows_a_job_that_has_not_succeeded_is_told_by_the_exit_code(capsys, dead_pid):
    failed, stopped = ended_job("bad", phase="failed", reason="out of luck"), ended_job("cut", phase="stopped")
    lost = new_job("gone")
    MasterAddress("127.0.0.1:1", TOKEN, dead_pid).write(lost.master)
    for job, said in ((failed, "failed: out of luck"), (lost, f"lost: {LOST}")):
        code, _, err = run(capsys, "status", "--follow", job.name)
        assert code == 1
        assert err.endswith(f"elasticdl status: job {job.name} {said}; all logs: {job.logs}\n")
    code, _, err = run(capsys, "status", "--follow", stopped.name)
    assert (code, err.splitlines()[-1]) == (1, "elasticdl status: job cut was stopped")


@pytest.mark.parametrize("name", ["status.json", "master.json", "journal.jsonl"])
def test_a_file_that_can_not_be_read_is_one_line_and_hides_no_other_job(capsys, name):
    """As one of a file server that fails, or of another user."""
    ended_job("good")
    (new_job("bad").path / name).mkdir()
    code, _, err = run(capsys, "report", "bad")
    path = jobs_root() / "bad" / name
    assert (code, err) == (1, f"elasticdl report: {path} can't be used: Is a directory\n")
    code, out, _ = run(capsys, "status")
    assert (code, "good" in out, "bad" in out) == (0, True, True)


@pytest.mark.parametrize("follow", [(), ("--follow",)])
@pytest.mark.parametrize("damaged", [b'{"phase"', b'{"phase": 3}', b"\xff"])
def test_a_damaged_status_is_one_line(capsys, damaged, follow):
    ended_job("bad").status.write_bytes(damaged)
    code, out, err = run(capsys, "status", "bad", *follow)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("elasticdl status: the last status of job bad is damaged: ")


def test_whoever_only_looks_on_goes_with_ctrl_c_and_the_job_goes_on(capsys, running):
    def press_ctrl_c() -> None:
        running.wait_for_watcher()
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press_ctrl_c)
    user.start()
    assert run(capsys, "status", "--follow", "live") == (130, "", "")
    user.join(DEADLINE)
    assert running.requests == []
