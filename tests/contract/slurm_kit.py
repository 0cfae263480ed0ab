"""`sbatch`, `squeue` and `scancel` as Slurm's answer, without Slurm."""

import os
import signal
import subprocess

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"


class FakeSlurm:
    """Has room for so many jobs at a time; ``really``: runs what they are to run, as Slurm would."""

    def __init__(self, room, really=False):
        self.room, self.really = room, really
        self.jobs, self.ends = {}, {}  # by id: state, and that of those which are told to end
        self.scripts, self.processes = {}, {}
        self.submitted = []
        self.problem = ""  # what `sbatch` says, while it takes no job

    async def __call__(self, argv, environment):
        program, *arguments = argv
        printed = getattr(self, program)(arguments, environment)
        return (1, "", self.problem) if printed is None else (0, printed, "")

    def sbatch(self, arguments, environment):
        self.submitted.append(arguments)
        if self.problem:
            return None
        job = str(100 + len(self.jobs))
        script = arguments[-1].removeprefix("--wrap=")
        self.jobs[job], self.scripts[job] = PENDING, (script, environment)
        self._fill()
        return f"{job};cluster\n"

    def squeue(self, arguments, environment):
        for job, process in self.processes.items():
            if self.jobs[job] in (RUNNING, COMPLETING) and process.poll() is not None:
                self.jobs[job] = self.ends.get(job) or ("FAILED" if process.returncode else "COMPLETED")
        self._fill()
        rows = ((job, state, "" if state == PENDING else "node-1") for job, state in self.jobs.items())
        return "".join(
            f"{job}|{state}|{node}|{'Resources' if state == PENDING else 'None'}\n" for job, state, node in rows
        )

    def scancel(self, arguments, environment):
        kill = "--signal=KILL" in arguments
        self.end(arguments[-1], "CANCELLED", signal.SIGKILL if kill else signal.SIGTERM)
        return ""

    def end(self, job, state, number=signal.SIGKILL):
        if self.jobs[job] in (PENDING, RUNNING):
            if process := self.processes.get(job):
                os.kill(process.pid, number)
                self.ends[job], state = state, COMPLETING
            self.jobs[job] = state
            self._fill()

    def _fill(self):
        for job, state in self.jobs.items():
            if state == PENDING and list(self.jobs.values()).count(RUNNING) < self.room:
                self.jobs[job] = RUNNING
                if self.really:
                    script, environment = self.scripts[job]
                    own = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "node-1"}
                    self.processes[job] = subprocess.Popen(["/bin/sh", "-c", script], env={**environment, **own})
