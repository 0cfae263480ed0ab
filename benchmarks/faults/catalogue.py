"""Which faults are planted, and what has to be said of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """By which entry of the journal a fault is noticed."""

    STUCK = "worker_stuck"
    SLOW = "worker_slow"
    ENDED = "worker_left"  # the job ends by an error that says it


@dataclass(frozen=True, slots=True)
class Fault:
    """``named``: what `where` (or the phase, of a slow worker) has to hold. ``limit``: which option says when it is noticed at
    the earliest. ``outside``: what befalls the process; else the program has it itself."""

    name: str
    words: str
    named: str
    limit: str = "progress_timeout"
    way: Way = Way.STUCK
    outside: str = ""
    loader_processes: int = 0
    seconds: float = 0.0  # of the limit, if another than usual


FAULTS = (
    Fault("wait_for_a_lock", "a lock that its holder waits for", "in wait_for_a_lock"),
    Fault(
        "load_behind_a_lock", "deadlock in the processes that load data", "in train", loader_processes=1, seconds=30.0
    ),
    Fault("skip_a_collective", "a rank skips a collective", "waits for all workers at elastic.mean()", way=Way.ENDED),
    Fault("spin", "while True: pass", "in spin"),
    Fault("hold_pythons_lock", "C code that keeps Python's lock", "in hold_pythons_lock", "heartbeat_timeout"),
    Fault("hang_in_c", "C code that hangs without the lock", "in hang_in_c"),
    Fault("search_for_ever", "a regular expression without end", "in search_for_ever", "heartbeat_timeout"),
    Fault("compile_for_ever", "a compiler process without end", "in compile_for_ever"),
    Fault("read_from_a_dead_mount", "a read from a file system that is gone", "in read_from_a_dead_mount"),
    Fault("receive_for_ever", "a storage server that says nothing more", "in receive_for_ever"),
    Fault("swallow_errors", "an error that is swallowed and tried again", "in swallow_errors"),
    Fault("print_into_a_full_pipe", "stdout is a full pipe", "in print_into_a_full_pipe"),
    Fault("touch_memory_that_never_comes", "swapped out to a dead disk", "in touch_memory_that_", "heartbeat_timeout"),
    Fault("stop", "SIGSTOP", "stopped (state T)", "heartbeat_timeout", outside="stop"),
    Fault("cut_off", "no packet passes between two workers", "all members wait", seconds=6.0, outside="cut"),
    Fault("throttle", "processor time of 15 %", "compute", "", Way.SLOW, outside="throttle"),
    Fault("load_slowly", "a slow disk", "data", "", Way.SLOW),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
