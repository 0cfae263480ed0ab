"""What the master of a local job gives to its workers."""

import asyncio

from elasticdl.job.jobdir import JobDir, MasterAddress
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.shell.local_master import local_launcher
from elasticdl.master.state.events import WorkerExited


def test_workers_share_the_cores_by_the_range_that_the_job_has_now(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = JobSpec(command=["sh", "-c", "echo $OMP_NUM_THREADS"], num_workers="1-2", start_method="spawn")
    job_dir = JobDir(tmp_path)
    job_dir.logs.mkdir()
    limits = WorkerRange(minimum=1, maximum=2)

    async def run():
        nonlocal limits
        ended = asyncio.Queue()
        make = local_launcher(spec, job_dir, MasterAddress("127.0.0.1:1", "token", 1))
        launcher = make(lambda event: isinstance(event, WorkerExited) and ended.put_nowait(event), lambda: limits)
        for worker_id, maximum in enumerate((2, 8, 20)):
            limits = WorkerRange(minimum=1, maximum=maximum)
            await launcher.launch(worker_id)
            await asyncio.wait_for(ended.get(), 30)
        await launcher.close()

    asyncio.run(run())
    assert [job_dir.worker_log(each).read_text().strip() for each in range(3)] == ["4", "1", "1"]
