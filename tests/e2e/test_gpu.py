"""On a GPU: which worker has it, who waits for it, and worlds whose tensors travel by NCCL."""

import os
import signal
import sys

import pytest
from running_job import REPOSITORY, start

from benchmarks.loops.library import OF_ALL
from elasticdl.places.local import find_gpus

pytestmark = pytest.mark.skipif(not find_gpus({}), reason="there is no GPU")
ONE = {"CUDA_VISIBLE_DEVICES": "0"}  # the other tests have none
DIGITS = ("--model_zoo", str(REPOSITORY / "model_zoo"), "--model_def", "digits.cnn_torch", "--global_batch_size", "256")


def has_gpu(pid):
    opened = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    return any(path.startswith("/dev/nvidia") for path in opened)


def test_a_gpu_is_one_workers_and_goes_on_to_the_next_job(tmp_path):
    options = (*DIGITS, "--num_workers", "1-2", "--num_epochs", "100000")
    with start(tmp_path, "train", *options, name="first", **ONE) as first:
        (worker,) = first.wait_for_world(size=1)["members"]
        first.wait_for_step(20)
        assert has_gpu(first.pid(worker))
        assert [e["reason"] for e in first.entries("worker_pending")] == ["every GPU is taken (1)"]
        assert first.entries("collective")[0]["engine"] == "torch with NCCL"
        with start(tmp_path, "train", *DIGITS, "--max_step", "5", name="second", **ONE) as second:
            waits = "every GPU is taken, some by other jobs of yours"
            second.wait_for("a reason", lambda: [e["reason"] for e in second.entries("worker_pending")] == [waits])
            first.signal(worker, signal.SIGKILL)
            first.wait_for_world_without(worker)
            started = first.entries("worker_started")
            assert [e["place"] for e in started] == ["slot-0", "slot-0"]
            assert not second.entries("worker_started")
            first.stop()
            first.finish()
            assert second.finish() == 0, second.describe()


def test_a_world_by_nccl_outlives_its_members(tmp_path):
    """Two workers share the GPU, each as if on a host of its own."""
    program = (sys.executable, "-m", "benchmarks.loops.library", "library", "--record", "steps", "--model", "1m")
    options = ("--num_workers", "1-2", "--slots", "2", "--collective", "torch", "--check_state", "1")
    with start(tmp_path, "run", *options, "--", *program, "--folder", str(tmp_path), **ONE, **OF_ALL) as job:
        world = job.wait_for_world(size=2)
        for number in (signal.SIGKILL, signal.SIGTERM):
            for rank in (0, 1):
                made = [e["step"] for e in job.entries("steps")][-1:] or [0]
                job.wait_for("a step", lambda made=made: [e["step"] for e in job.entries("steps")][-1:] > made)
                lost = world["members"][rank]
                job.signal(lost, number)
                after = job.wait_for_world_without(lost)
                world = job.wait_for_world(size=2, after=after["world"] - 1)
        job.stop()
        job.finish()
        assert {e["engine"] for e in job.entries("collective")} == {"torch with NCCL"}
        assert not job.entries("warning")
        torn = [e["steps_torn"] for e in job.entries("pause") if e["kind"] == "failure"]
        assert torn, job.describe()
        assert max(torn) <= 1
