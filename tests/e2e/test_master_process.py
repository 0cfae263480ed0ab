"""A real master process with simulated workers, struck by signals."""

import json
import queue
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil
import pytest

from elasticdl.job.jobdir import JobDir, create_job_dir
from elasticdl.job.journal import read_journal
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

HOST = "127.0.0.1"
HERE = Path(__file__).parent
WORKER = HERE / "simulated_worker.py"
DEADLINE = 60.0
FOREVER = 1_000_000


class MasterProcess:
    """A job that was started; `stub` speaks to its master."""

    def __init__(self, workers="2-3", steps=FOREVER, fail_at=0, **options):
        command = options.pop("command", (sys.executable, str(WORKER), str(steps), str(fail_at)))
        options = {"heartbeat_timeout": 5.0, "stop_grace": 10.0, **options}
        self.spec = JobSpec(num_workers=workers, command=command, **options)
        self.dir = create_job_dir(f"job-{time.monotonic_ns()}")
        self.dir.spec.write_text(self.spec.to_json())
        self.process = self.start()
        self.channel = self.stub = self.metadata = None

    def start(self, *more):
        command = [
            sys.executable,
            "-m",
            "elasticdl.master.shell.local_master",
            "--job_dir",
            str(self.dir.path),
            *more,
        ]
        with self.dir.master_log.open("a") as log:
            return subprocess.Popen(command, stderr=log, start_new_session=True)

    def log(self):
        return self.dir.master_log.read_text()

    def connect(self):
        end = time.monotonic() + DEADLINE
        while (address := self.dir.read_master()) is None:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.02)
        self.channel = grpc.insecure_channel(address.address)
        self.stub = pb_grpc.MasterStub(self.channel)
        self.metadata = (("elasticdl-token", address.token),)
        return self

    def status(self):
        return self.stub.Status(pb.StatusRequest(), metadata=self.metadata, timeout=DEADLINE)

    def until(self, holds):
        """The first status for which this holds."""
        shown = None
        try:
            for shown in self.stub.Watch(pb.StatusRequest(), metadata=self.metadata, timeout=DEADLINE):
                if holds(shown):
                    return shown
        except grpc.RpcError as error:
            pytest.fail(f"{error.details()}; last status: {shown}; log: {self.log()}")
        return pytest.fail(f"the job ended before: {shown}; log: {self.log()}")

    def world_of(self, *ids):
        """Wait for the world of these workers; returns their processes."""
        status = self.until(lambda s: sorted(w.worker_id for w in s.workers if w.rank >= 0) == sorted(ids))
        return {w.worker_id: psutil.Process(w.pid) for w in status.workers if w.rank >= 0}

    def stop(self, **how):
        self.stub.Stop(pb.StopRequest(reason="enough", **how), metadata=self.metadata, timeout=DEADLINE)

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE)
        self.channel.close()
        self.dir.master.unlink()

    def wait(self):
        return self.process.wait(DEADLINE)

    def journal(self, *events):
        return [entry for entry in read_journal(self.dir.journal) if entry["event"] in events]

    def leftovers(self):
        """Processes of this job that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.dir.spec) in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self):
        if self.channel:
            self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
        psutil.wait_procs(self.leftovers(), timeout=DEADLINE)


class LastingMaster(MasterProcess):
    """A master whose workers outlive it, at an address that stays."""

    def __init__(self, steps=FOREVER, **options):
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        super().__init__(command=(sys.executable, str(HERE / "lasting_worker.py"), str(steps)), **options)

    def start(self, *more):
        address = f"{HOST}:{self.port}"
        command = [sys.executable, "-m", "benchmarks.storm.lasting_master", str(self.dir.path), address]
        with self.dir.master_log.open("a") as log:
            return subprocess.Popen(command, stderr=log, start_new_session=True, cwd=HERE.parents[1])

    def start_again(self):
        self.process = self.start()
        self.connect()

    def close(self):
        super().close()
        for process in self.leftovers():  # they have nobody else to end them
            process.kill()
        psutil.wait_procs(self.leftovers(), timeout=DEADLINE)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start jobs with a home of their own; whatever happens, they are gone after the test."""
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    jobs = []

    def starter(kind=MasterProcess, **options):
        jobs.append(kind(**options))
        return jobs[-1]

    with tempfile.TemporaryDirectory(prefix="elasticdl-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)  # a master that is killed leaves its workers' folders in it
        yield starter
        for job in jobs:
            job.close()


def test_a_job_runs_to_its_end_and_leaves_only_its_books(start, tmp_path):
    job = start(steps=30, output=str(tmp_path / "out"), tensorboard_log_dir=str(tmp_path / "board")).connect()
    statuses = list(job.stub.Watch(pb.StatusRequest(), metadata=job.metadata, timeout=DEADLINE))
    assert job.wait() == 0, job.log()
    assert statuses[-1].phase == "succeeded"
    assert statuses[-1].step == 30
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("succeeded", 30, 240)
    assert summary["metrics"] == {"accuracy": 0.9}
    assert summary["worlds"][0]["version"] == 1
    assert json.loads(job.dir.status.read_text())["phase"] == "succeeded"
    assert not job.dir.master.exists()
    assert list((tmp_path / "board").iterdir())
    assert job.leftovers() == []
    assert job.journal("job_finished")[0]["phase"] == "succeeded"


def test_members_see_what_the_others_put_into_their_worlds_store(start):
    job = start(steps=50, workers="2").connect()
    job.wait()
    assert "world 1: entry of 1" in job.dir.worker_log(0).read_text()
    assert "world 1: entry of 0" in job.dir.worker_log(1).read_text()


def test_a_killed_worker_is_replaced_and_training_goes_on(start):
    job = start().connect()
    workers = job.world_of(0, 1, 2)
    step = job.status().step
    workers[1].kill()
    job.world_of(0, 2, 3)
    job.until(lambda s: s.step > step + 5)
    left = job.journal("worker_left")
    assert [(entry["worker"], entry["cause"], entry["code"]) for entry in left] == [(1, "killed", -9)]
    worlds = job.journal("world_formed")
    assert [sorted(entry["members"]) for entry in worlds[-2:]] == [[0, 2], [0, 2, 3]]


def test_a_worker_told_to_leave_is_replaced_without_breaking_the_world(start):
    job = start().connect()
    job.world_of(0, 1, 2)[2].terminate()
    job.world_of(0, 1, 3)
    assert [entry["replaces"] for entry in job.journal("worker_launched")] == [False, False, False, True]
    assert job.journal("world_broken") == []
    assert job.journal("worker_left")[0]["cause"] == "drained"


def test_a_frozen_worker_is_found_out_and_replaced(start):
    job = start(heartbeat_timeout=1.5).connect()
    job.world_of(0, 1, 2)[0].suspend()
    job.world_of(1, 2, 3)
    assert job.journal("worker_left")[0]["cause"] == "frozen"


def test_the_job_grows_and_shrinks_on_command(start):
    job = start(workers="1").connect()
    job.world_of(0)
    reply = job.stub.Scale(pb.ScaleRequest(min_workers=2, max_workers=3), metadata=job.metadata, timeout=DEADLINE)
    assert reply.message.endswith(": workers now 2-3, before 1")
    job.world_of(0, 1, 2)
    job.stub.Scale(pb.ScaleRequest(min_workers=1, max_workers=2), metadata=job.metadata, timeout=DEADLINE)
    status = job.until(lambda s: len(s.workers) == 2 and all(w.rank >= 0 for w in s.workers))
    assert (status.min_workers, status.max_workers) == (1, 2)
    with pytest.raises(grpc.RpcError, match="MIN-MAX"):
        job.stub.Scale(pb.ScaleRequest(min_workers=3, max_workers=2), metadata=job.metadata, timeout=DEADLINE)


def test_more_workers_than_slots_stay_pending(start):
    job = start(slots=2).connect()
    job.world_of(0, 1)
    (pending,) = [w for w in job.status().workers if w.state == "pending"]
    assert pending.reason == "every slot is taken (2)"


def test_stop_leaves_nothing_behind(start):
    job = start().connect()
    job.world_of(0, 1, 2)
    events = job.stub.Events(pb.EventsRequest(follow=True), metadata=job.metadata, timeout=DEADLINE)
    job.stop(checkpoint=True)
    assert json.loads(list(events)[-1].json)["event"] == "job_finished"
    assert job.wait() == 130
    assert json.loads(job.dir.status.read_text())["reason"] == "enough"
    assert job.leftovers() == []
    assert not job.dir.master.exists()


def test_sigterm_stops_the_job_and_a_second_one_at_once(start):
    job = start(stop_grace=1000.0).connect()
    job.world_of(0, 1, 2)[1].suspend()  # it would use up the grace period
    job.process.terminate()
    job.until(lambda s: s.phase == "stopping")
    job.process.terminate()
    assert job.wait() == 130
    assert job.leftovers() == []


def test_the_users_error_fails_the_job_with_its_traceback(start):
    job = start(fail_at=5).connect()
    assert job.wait() == 1
    status = json.loads(job.dir.status.read_text())
    assert (status["phase"], status["reason"]) == ("failed", "ValueError: no")
    assert status["traceback"] == "Traceback: ValueError: no"
    assert job.leftovers() == []


def test_a_program_that_never_starts_fails_the_job_and_says_so(start):
    job = start(workers="1", command=("no-such-program",))
    assert job.wait() == 1
    status = json.loads(job.dir.status.read_text())
    assert "3 workers in a row failed at the start" in status["reason"]
    assert status["traceback"].splitlines()[-1] == "can't run no-such-program: No such file or directory"


def test_a_program_without_the_library_does_not_succeed_though_it_ends_well(start):
    job = start(command=("true",))
    assert job.wait() == 1
    assert "took no part in the job" in json.loads(job.dir.status.read_text())["reason"]


def test_a_worker_does_not_outlive_a_master_that_is_killed(start):
    job = start().connect()
    workers = job.world_of(0, 1, 2)
    job.process.kill()
    _, alive = psutil.wait_procs(workers.values(), timeout=DEADLINE)
    assert alive == []


def test_a_master_does_not_outlive_its_parent(start, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = start(steps=1)  # only for its directory
    job.wait()
    command = [
        sys.executable,
        "-m",
        "elasticdl.master.shell.local_master",
        "--job_dir",
        str(job.dir.path),
        "--temporary",
        str(temporary),
        "--die_with_parent",
    ]
    script = f"import os, subprocess; subprocess.Popen([*{command!r}, str(os.getpid())]); input()"
    job.spec = JobSpec(num_workers=1, command=(sys.executable, str(WORKER), str(FOREVER)))
    job.dir.spec.write_text(job.spec.to_json())
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, start_new_session=True)
    job.process = parent
    job.connect().world_of(0)
    master = psutil.Process(job.dir.read_master().pid)
    parent.kill()
    parent.wait(DEADLINE)
    master.wait(DEADLINE)
    assert json.loads(job.dir.status.read_text())["reason"] == "the command that started the job is gone"
    assert job.leftovers() == []
    assert not temporary.exists()


def test_a_master_whose_parent_is_gone_already_starts_nothing(tmp_path):
    job = JobDir(tmp_path / "job")
    job.path.mkdir()
    command = [
        sys.executable,
        "-m",
        "elasticdl.master.shell.local_master",
        "--job_dir",
        str(job.path),
        "--die_with_parent",
        "1",
    ]
    assert subprocess.run(command, timeout=DEADLINE, check=False).returncode == 130
    assert list(job.path.iterdir()) == []


def test_a_master_that_is_held_leaves_no_folder_of_a_parent_that_is_killed(start, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = start(steps=1)  # only for its directory
    job.wait()
    module = "elasticdl.master.shell.local_master"
    command = [sys.executable, "-m", module, "--job_dir", str(job.dir.path), "--held", "--temporary", str(temporary)]
    script = f"""
import os, subprocess
command = [*{command!r}, "--die_with_parent", str(os.getpid())]
print(subprocess.Popen(command, stdin=subprocess.PIPE).pid, flush=True)
input()
"""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", script], **options) as parent:
        master = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    master.wait(DEADLINE)
    assert not temporary.exists()


@pytest.mark.parametrize("metadata", [(), (("elasticdl-token", "wrong"),)])
def test_calls_without_the_token_are_refused(start, metadata):
    job = start().connect()
    hello = pb.WorkerMessage(hello=pb.Hello(worker_id=0))
    calls = [
        lambda: job.stub.Status(pb.StatusRequest(), metadata=metadata, timeout=DEADLINE),
        lambda: job.stub.Stop(pb.StopRequest(), metadata=metadata, timeout=DEADLINE),
        lambda: list(job.stub.Events(pb.EventsRequest(), metadata=metadata, timeout=DEADLINE)),
        lambda: list(job.stub.Session(iter([hello]), metadata=metadata, timeout=DEADLINE)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_session_that_begins_otherwise_than_with_hello_is_refused(start):
    job = start().connect()
    with pytest.raises(grpc.RpcError, match="begins with Hello"):
        list(job.stub.Session(iter([pb.WorkerMessage(ask=pb.Ask())]), metadata=job.metadata, timeout=DEADLINE))


def test_a_newer_session_of_a_worker_ends_the_older(start):
    job = start(workers="1", command=("sleep", str(DEADLINE))).connect()
    hello = pb.WorkerMessage(hello=pb.Hello(worker_id=0))
    words = [queue.SimpleQueue(), queue.SimpleQueue()]
    sessions = []
    for said in words:
        said.put(hello)
        sessions.append(job.stub.Session(iter(said.get, None), metadata=job.metadata, timeout=DEADLINE))
        assert next(sessions[-1]).welcome.job_name == job.dir.name
    with pytest.raises(grpc.RpcError) as ended:
        next(sessions[0])
    assert ended.value.code() is grpc.StatusCode.ABORTED
    words[1].put(hello)
    with pytest.raises(grpc.RpcError, match="does not take hello"):
        next(sessions[1])
    for said in words:
        said.put(None)


@pytest.mark.parametrize(
    "last_word", [pb.WorkerMessage(finished=pb.Finished(step=3)), pb.WorkerMessage(failed=pb.Failed(message="no"))]
)
def test_a_worker_is_told_that_its_last_word_is_taken(start, last_word):
    """Its process may end at once then, and what a broken connection had not brought across would be lost."""
    job = start(workers="1", command=("sleep", str(DEADLINE))).connect()
    said = queue.SimpleQueue()
    said.put(pb.WorkerMessage(hello=pb.Hello(worker_id=0)))
    answers = job.stub.Session(iter(said.get, None), metadata=job.metadata, timeout=DEADLINE)
    assert next(answers).HasField("welcome")
    said.put(last_word)
    assert any(answer.HasField("last_word_taken") for answer in answers)
    said.put(None)


def test_a_port_that_is_taken_is_one_clear_line(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = start(port=port)
        assert job.wait() == 2
    lines = job.log().splitlines()
    assert lines[-1] == f"elasticdl: port {port} of 127.0.0.1 is taken: choose another --port, or 0 for any free one"
    assert not job.dir.master.exists()


def test_a_specification_that_is_wrong_is_one_clear_line(start):
    job = start(steps=1)
    job.wait()
    job.dir.spec.write_text(json.dumps({"stop_grace": -1}))
    process = job.start()
    assert process.wait(DEADLINE) == 2
    assert job.log().splitlines()[-1].endswith("job.json: stop_grace: Input should be greater than 0")


def test_two_jobs_do_not_disturb_each_other(start):
    first, second = start(workers="1").connect(), start(workers="1").connect()
    first.world_of(0)
    second.world_of(0)
    first.stop(now=True)
    assert first.wait() == 130
    assert second.status().phase == "running"


def test_training_goes_on_without_a_master_and_the_next_one_takes_up_its_world(start):
    job = start(LastingMaster).connect()
    job.world_of(0, 1, 2)
    before = job.until(lambda s: s.step > 60)
    worlds = len(job.journal("world_formed"))  # a worker that starts slowly comes into a second one
    job.kill()
    job.start_again()
    workers = job.world_of(0, 1, 2)
    after = job.until(lambda s: s.step > before.step + 100)
    assert after.world_version == before.world_version
    assert [w.rank for w in after.workers] == [w.rank for w in before.workers]
    assert [w.pid for w in after.workers] == [w.pid for w in before.workers]
    assert [len(job.journal(event)) for event in ("job_started", "master_restarted", "world_formed")] == [1, 1, worlds]
    assert job.journal("change_announced", "world_broken", "worker_left") == []
    epochs = job.journal("epoch_finished")
    assert [entry["epoch"] for entry in epochs] == list(range(len(epochs)))
    means = [sum(range(50 * n + 1, 50 * n + 51)) / 50 for n in range(len(epochs))]
    assert [entry["loss"] for entry in epochs] == means, "no step was lost, and none counted twice"
    workers[1].kill()
    job.world_of(0, 2, 3)
    assert [(entry["worker"], entry["cause"]) for entry in job.journal("worker_left")] == [(1, "killed")]
    job.stop()
    assert job.wait() == 130
    assert job.leftovers() == []


def test_workers_that_finish_without_a_master_wait_to_say_so(start):
    job = start(LastingMaster, steps=100, workers="2").connect()
    job.world_of(0, 1)
    job.kill()
    end = time.monotonic() + DEADLINE
    while not all("finished" in job.dir.worker_log(worker_id).read_text() for worker_id in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.05)
    job.start_again()
    assert job.wait() == 0, job.log()
    status = json.loads(job.dir.status.read_text())
    assert (status["phase"], status["step"], status["metrics"]) == ("succeeded", "100", {"accuracy": 0.9})
    assert [entry["worker"] for entry in job.journal("worker_launched")] == [0, 1]
    assert [entry["cause"] for entry in job.journal("worker_left")] == ["finished", "finished"]
