"""Plant faults into real jobs, one after the other, and see whether the right worker is named, and how soon.

    python -m benchmarks.faults [--faults spin,stop] [--workers 3] [--collective torch] [--out FILE]

Each job trains with short limits. After: seconds without progress, or a sign of life, until the journal tells of it; for slow
workers, for whom there is no limit, since the fault began. Exit code 0 only if each was noticed and named rightly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from benchmarks.harness import Parser, Results, add_out, names, show_table
from benchmarks.job import COMMAND, ElasticJob, flags_of
from benchmarks.processes import Failed, Processes, scratch, wait_until
from elasticdl.job.journal import Entry, standing

LIMITS = {"progress_timeout": 8.0, "heartbeat_timeout": 5.0}
VICTIM = 1
START_SECONDS = 120.0
SETTLE_SECONDS = 4.0
NOTICE_SECONDS = 90.0
DONE_SECONDS = 60.0
LOOK_SECONDS = 60.0
# Of a process that is throttled: it runs for so long, and is stopped for the rest of the period.
PERIOD, SHARE = 0.1, 0.15


class Way(StrEnum):
    """By which entry of the journal a fault is noticed."""

    STUCK = "worker_stuck"
    SLOW = "worker_slow"
    ENDED = "worker_left"  # the job ends by an error that says it


@dataclass(frozen=True, slots=True)
class Fault:
    """``named``: what `where` (or the phase, of a slow worker) has to hold. ``limit``: which option says when it is noticed at
    the earliest. ``outside``: what befalls the process; else the program has it itself.
    """

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
    Fault("throttle", "processor time of 15 %", "compute", "", Way.SLOW, outside="throttle"),
    Fault("load_slowly", "a slow disk", "data", "", Way.SLOW),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Finding:
    """``after``: seconds since the last sign of progress, or of life; of a slow worker, or an error, since it began.
    ``told``: of whom, and what. ``shown``: what commands print meanwhile, if somebody looks.
    """

    fault: str
    words: str
    after: float
    right: bool
    told: str
    done: str
    stack: tuple[str, ...]
    shown: Mapping[str, str] = field(default_factory=dict)


def main() -> int:
    args = parse()
    results = Results("faults", args.out)
    findings = [measure(fault, args, results) for fault in FAULTS if fault.name in args.faults]
    columns = ("fault", "after, s", "limit, s", "named", "what was told", "what was done")
    rows = [(f.words, f"{f.after:.1f}", _limit(BY_NAME[f.fault]), _verdict(f), f.told, f.done) for f in findings]
    show_table(f"Faults in a job of {args.workers} workers", columns, rows)
    print(f"results: {results.path}")
    return 0 if all(finding.right for finding in findings) else 1


def parse() -> argparse.Namespace:
    every = [fault.name for fault in FAULTS]
    parser = Parser("faults", __doc__)
    parser.add_argument("--faults", type=names, default=every, help=",".join(every))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--collective", default="auto")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, faults=every)
    if args.workers < 2:
        parser.error(f"--workers {args.workers}: at least 2, so that somebody waits")
    return args


def measure(fault: Fault, args: argparse.Namespace, results: Results) -> Finding:
    limits = {**LIMITS, **({fault.limit: fault.seconds} if fault.seconds else {})}
    try:
        with scratch(results.path.parent / f"failed-fault-{fault.name}-{time.time():.0f}") as processes:
            finding = find(fault, limits, args.workers, args.collective, processes)
    except Failed as failure:  # nothing was noticed
        said = str(failure).splitlines()[0]
        finding = Finding(fault.name, fault.words, float("nan"), False, said, "", ())
    setting = {"workers": args.workers, "collective": args.collective, "limit": fault.limit}
    results.add("fault", **asdict(finding), **setting, seconds=_limit(fault))
    named = f"named after {finding.after:.1f} s, {_verdict(finding)}"
    print(f"{fault.name}: {named}: {finding.told}; {finding.done}", flush=True)
    return finding


def _verdict(finding: Finding) -> str:
    return "rightly" if finding.right else "WRONGLY"


def _limit(fault: Fault) -> str:
    """At the latest it is named then; the job may have learnt a shorter one."""
    seconds = fault.seconds or LIMITS.get(fault.limit)
    return f"{seconds:g}" if seconds else "none"


def find(
    fault: Fault, limits: dict[str, float], workers: int, collective: str, processes: Processes, *, look: bool = False
) -> Finding:
    folder = processes.folder
    program = [sys.executable, "-m", "benchmarks.faults.program", str(folder), fault.name, str(VICTIM)]
    program += flags_of({"loader_processes": fault.loader_processes})
    options = {"collective": collective, **{name: f"{seconds:g}" for name, seconds in limits.items()}}
    job = ElasticJob("faults", str(workers), program, options, processes)
    job.start()
    formed = job.journal.wait(lambda e: e["event"] == "world_formed", 0, START_SECONDS, "a first world")
    job.journal.wait(lambda e: e["event"] == "epoch_finished", 0, START_SECONDS, "a first epoch")
    time.sleep(SETTLE_SECONDS)
    mark, pid = job.journal.mark(), job.pid_of(VICTIM)
    with _disturbed(fault, pid):
        began = time.time()
        if not fault.outside:
            (folder / "begin").touch()
            wait_until((folder / "began").exists, NOTICE_SECONDS, "the fault begins")
            began = float((folder / "began").read_text())
        what = f"{fault.way} of {fault.name}"
        noticed = job.journal.wait(lambda e: _is_victims(e, fault.way), mark, NOTICE_SECONDS, what)
        shown = {name: _print(name, processes) for name in ("status", "events")} if look else {}
        ends = fault.way is Way.ENDED
        done = "the job ends" if ends else _done(job, mark, formed) if limits.get(fault.limit) else "told"
    job.stop(60.0)
    told = [e for e in job.journal.read()[mark:] if e["event"] == fault.way and e["time"] <= noticed["time"] + 0.5]
    told = [e for e in told if e.get("cause") != "drained"]
    where = str(noticed["reason"]) if ends else standing(noticed) or str(noticed.get("phase", ""))
    named = {entry["worker"] for entry in told}
    right = fault.named in where and named == {VICTIM}
    after = noticed["seconds"] if fault.way is Way.STUCK else noticed["time"] - began
    who = "workers" if len(named) > 1 else "worker"
    text = f"{who} {', '.join(map(str, sorted(named)))}: {where}"
    return Finding(fault.name, fault.words, round(after, 2), right, text, done, tuple(noticed.get("stack", ())), shown)


def _print(command: str, processes: Processes) -> str:
    env = {**processes.env, "ELASTICDL_HOME": str(processes.folder)}
    asked = [*COMMAND, command, "faults"]
    return subprocess.run(asked, env=env, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True).stdout


def _is_victims(entry: Entry, event: str) -> bool:
    return entry["event"] == event and bool(entry["worker"] == VICTIM)


def _done(job: ElasticJob, mark: int, formed: Entry) -> str:
    """What the master did: the worker was replaced, or all have left the world."""

    def acts(entry: Entry) -> bool:
        broken = entry["event"] == "world_broken" and "all members" in entry["reason"]
        return broken or _is_victims(entry, "worker_left")

    act = job.journal.wait(acts, mark, DONE_SECONDS, "something is done")
    job.journal.wait(lambda e: e["event"] == "world_formed", mark, DONE_SECONDS, "another world")
    return "replaced" if act["event"] == "worker_left" else "world formed anew"


@contextlib.contextmanager
def _disturbed(fault: Fault, pid: int) -> Iterator[None]:
    """Within, what befalls the process from outside."""
    over = threading.Event()
    thread = threading.Thread(target=_throttle, args=(pid, over))
    if fault.outside == "throttle":
        thread.start()
    elif fault.outside == "stop":
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        over.set()
        if fault.outside == "throttle":
            thread.join()


def _throttle(pid: int, over: threading.Event) -> None:
    """As a group of processes with a small quota: it runs for a part of each period."""
    with contextlib.suppress(ProcessLookupError):
        while not over.is_set():
            os.killpg(pid, signal.SIGSTOP)
            over.wait(PERIOD * (1 - SHARE))
            os.killpg(pid, signal.SIGCONT)
            over.wait(PERIOD * SHARE)


if __name__ == "__main__":
    sys.exit(main())
