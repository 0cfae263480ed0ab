"""The part of the job's specification that the core decides by."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.common.spec import JobSpec, WorkerRange


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds."""

    workers: WorkerRange
    join_window: float = 0.3
    start_timeout: float = 600.0
    heartbeat_timeout: float = 10.0
    progress_timeout: float = 300.0
    stop_grace: float = 30.0
    # For workers to come back to a master that was started again: its address may take long to be known everywhere.
    recovery_timeout: float = 60.0
    # The workers run the user's own program, which may never connect.
    own_program: bool = False

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Settings:
        return cls(
            workers=spec.num_workers,
            join_window=spec.join_window,
            start_timeout=spec.start_timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            progress_timeout=spec.progress_timeout,
            stop_grace=spec.stop_grace,
            recovery_timeout=spec.recovery_timeout,
            own_program=bool(spec.command),
        )
