"""A job that is told what happens to its workers, and what it has launched and killed."""

from master_kit import step

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.job_core import Job
from elasticdl.master.state import events as e
from elasticdl.master.state import instructions as i
from elasticdl.master.state.events import ExitCause
from elasticdl.master.state.values import Settings

START, GRACE, LONG = 600.0, 30.0, 10.0**9
TO_LAUNCHERS = (i.LaunchWorker, i.DrainWorker, i.KillWorker)


class Yard:
    """A job whose workers are never silent or stuck."""

    def __init__(self, maximum=3, heartbeat_timeout=LONG, **more):
        times = {"start_timeout": START, "stop_grace": GRACE, "progress_timeout": LONG, "join_window": 0.1}
        limits = WorkerRange(minimum=1, maximum=maximum)
        self.job = Job(Settings(limits, heartbeat_timeout=heartbeat_timeout, **times, **more))
        self.now = 0.0
        self.records = []

    def post(self, *events):
        out = [instruction for event in events for instruction in step(self.job, event, self.now)]
        self.records += [o for o in out if isinstance(o, i.Record)]
        return [o for o in out if isinstance(o, TO_LAUNCHERS)]

    def wait(self, seconds=0.0):
        """In two steps, as a master that was held up forgives everybody."""
        out = []
        for _ in range(2):
            self.now += seconds / 2
            out += self.post(e.Tick())
        return out

    def place(self, worker_id):
        return self.post(e.WorkerPlaced(worker_id, "h", 100 + worker_id))

    def connect(self, worker_id):
        return self.post(e.WorkerConnected(worker_id, "h", 100 + worker_id))

    def join(self, worker_id, left=0):
        return self.post(e.JoinRequested(worker_id, left, 0, has_state=left > 0))

    def start(self):
        """Launch all there should be, connect them, and put them into a world."""
        ids = launched(self.wait())
        for worker_id in ids:
            self.place(worker_id)
            self.connect(worker_id)
        for worker_id in ids:
            self.join(worker_id)
        return ids

    def exit(self, worker_id, cause=ExitCause.KILLED, code=-9, node=""):
        return self.post(e.WorkerExited(worker_id, cause, code, "detail", node=node))

    def crash(self, worker_id):
        return self.exit(worker_id, ExitCause.CRASHED, 1)

    def train(self, worker_id, *steps):
        version = self.job.view().world_version
        reports = tuple(e.StepReport(n, 0, 0.5, 8, 0.1, 0.05, version, 8 * n, False) for n in steps)
        self.post(e.ProgressReported(worker_id, reports, 1000, 1))

    @property
    def causes(self):
        return [record.fields["cause"] for record in self.records if record.event == "worker_left"]

    @property
    def end(self):
        view = self.job.view()
        return view.reason if view.phase in ("stopping", "failed") else ""


def launched(instructions):
    return [o.worker_id for o in instructions if isinstance(o, i.LaunchWorker)]


def killed(instructions):
    return [(o.worker_id, o.reason) for o in instructions if isinstance(o, i.KillWorker)]
