"""What a real master says to workers that speak out of turn, and how it ends."""

import queue
import signal
import sys
from pathlib import Path

import grpc
import pytest
from running_job import DEADLINE, start

from elasticdl.job.jobdir import MasterAddress
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

HELLO = pb.WorkerMessage(hello=pb.Hello(worker_id=0))


@pytest.fixture
def session(tmp_path):
    """Opens sessions of worker 0, whose own process waits; returns what is said, and the answers."""
    with start(tmp_path, "run", "--num_workers", "1", "--stop_grace", "1", "--", "sleep", str(DEADLINE)) as job:
        job.wait_for("a worker", lambda: job.entries("worker_started"))
        address = MasterAddress.read(job.job.master)
        said = []

        def begin(*words):
            said.append(queue.SimpleQueue())
            for word in words:
                said[-1].put(word)
            metadata = (("elasticdl-token", address.token),)
            answers = pb_grpc.MasterStub(channel).Session(iter(said[-1].get, None), metadata=metadata, timeout=DEADLINE)
            return said[-1], answers

        with grpc.insecure_channel(address.address) as channel:
            yield begin
            for each in said:
                each.put(None)


def test_a_session_begins_with_hello_and_a_newer_one_ends_the_older(session):
    _, answers = session(pb.WorkerMessage(ask=pb.Ask()))
    with pytest.raises(grpc.RpcError, match="begins with Hello"):
        next(answers)
    _, older = session(HELLO)
    assert next(older).welcome.job_name == "job"
    said, newer = session(HELLO)
    assert next(newer).HasField("welcome")
    with pytest.raises(grpc.RpcError) as ended:
        next(older)
    assert ended.value.code() is grpc.StatusCode.ABORTED
    said.put(HELLO)
    with pytest.raises(grpc.RpcError, match="does not take hello"):
        next(newer)


@pytest.mark.parametrize("last_word", [{"finished": pb.Finished(step=3)}, {"failed": pb.Failed(message="no")}])
def test_a_worker_is_told_that_its_last_word_is_taken(session, last_word):
    """Its process may end at once then, and what a broken connection had not brought across would be lost."""
    said, answers = session(HELLO)
    assert next(answers).HasField("welcome")
    said.put(pb.WorkerMessage(**last_word))
    assert any(answer.HasField("last_word_taken") for answer in answers)


def test_sigterm_stops_the_job_and_a_second_signal_at_once(tmp_path):
    worker = [sys.executable, "tests/e2e/simulated_worker.py", "1000000"]
    with start(tmp_path, "run", "--num_workers", "2", "--stop_grace", "1000", "--", *worker) as job:
        world = job.wait_for_world(size=2)
        job.signal(world["members"][1], signal.SIGSTOP)  # it would use up the grace period
        assert MasterAddress.read(job.job.master).pid == job.process.pid
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("the end to be decided", lambda: "stopping" in [e["phase"] for e in job.entries("phase")])
        job.process.send_signal(signal.SIGINT)  # several of the others within a second would count as one
        assert job.finish() == 143
        assert job.processes() == []


FILLS = "import os, time\nif os.environ['ELASTICDL_WORKER_ID'] == '0': b'1' * (1 << 30)\ntime.sleep(1000)"


@pytest.fixture
def group(tmp_path):
    """A control group with half a gigabyte of memory."""
    made = Path("/sys/fs/cgroup", "memory" if Path("/sys/fs/cgroup/memory").is_dir() else "", tmp_path.name)
    try:
        made.mkdir()
        limit = made / ("memory.limit_in_bytes" if made.parent.name == "memory" else "memory.max")
        limit.write_text(str(1 << 29))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield made
    made.rmdir()


def test_a_worker_out_of_memory_is_told_and_replaced(tmp_path, group):
    with start(tmp_path, "run", "--num_workers", "1", "--stop_grace", "1", "--", sys.executable, "-c", FILLS) as job:
        (group / "cgroup.procs").write_text(str(job.process.pid))
        job.wait_for("another worker", lambda: any(each["worker"] == 1 for each in job.entries("worker_started")))
        assert job.entries("worker_left")[0]["cause"] == "out_of_memory", job.describe()
