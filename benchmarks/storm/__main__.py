"""One storm of disturbances over real training on this machine, at random moments.

    python -m benchmarks.storm --disturbances 1000 --seed 1 [--processes_per_worker 2] [--out FILE]

Workers are killed, told to leave, stopped and frozen; the job is scaled; its master is killed and started again; the disk
of its checkpoints is full; a worker is cut off from the master, or from another worker. Of workers of several processes, which
share the model by FSDP2, any process is hit, or the one that leads them; they write no checkpoints. Exit code 0 only if every step's
loss is that of an undisturbed run, every sample was used exactly once an epoch, the job succeeded, and nothing is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.harness import RESULTS, Parser, add_out
from benchmarks.processes import ROOT
from benchmarks.storm.job import MOST_WORKERS
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import require_writable
from tests.cluster.processes import Leashed

# Without root, namespaces are those of a user who is root in them.
NAMESPACES = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--net", "--mount")
TRIAL_SECONDS = 20.0
CLEAN_UP_SECONDS = 60.0
INTERRUPTED = 130


def parse(parser: Parser) -> argparse.Namespace:
    parser.add_argument("--disturbances", type=int, default=100, help="how many (100)")
    parser.add_argument("--processes_per_worker", type=int, default=1, help="that share the model (1)")
    parser.add_argument("--most_workers", type=int, default=MOST_WORKERS, help=f"at any time ({MOST_WORKERS})")
    parser.add_argument("--seed", type=int, default=1, help="of what happens, when, to whom and for how long (1)")
    add_out(parser)
    args = parser.parse_args()
    if args.disturbances < 1:
        parser.error(f"--disturbances {args.disturbances}: must be at least 1")
    if args.processes_per_worker < 1:
        parser.error(f"--processes_per_worker {args.processes_per_worker}: must be at least 1")
    if not 3 <= args.most_workers <= MOST_WORKERS:
        parser.error(f"--most_workers {args.most_workers}: must be from 3 to {MOST_WORKERS}")
    args.out = (args.out or RESULTS / f"storm-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl").absolute()
    if args.out.is_dir():
        parser.error(f"--out {args.out}: is a folder; give a file")
    try:
        require_writable("--out", args.out.parent)
    except UserError as error:
        parser.error(str(error))
    return args


def main() -> int:
    parser = Parser("storm", __doc__)
    args = parse(parser)
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    if tried.returncode:
        parser.error(f"needs network and mount namespaces, which this machine refuses: {tried.stderr.strip()}")
    folder = Path(tempfile.mkdtemp(prefix="elasticdl-storm-"))
    (folder / "tmp").mkdir()
    command = [*NAMESPACES, sys.executable, "-m", "benchmarks.storm.inside"]
    command += [str(folder), str(args.out), str(args.disturbances), str(args.seed)]
    command += [str(args.processes_per_worker), str(args.most_workers)]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    inside = Leashed.start(command, None, environment, ROOT, afterwards=("rm", "-rf", str(folder)))
    try:
        code = _follow(inside)
    finally:
        inside.stop()
    if left := _leftovers(folder):
        print(f"left over: {', '.join(left)}", file=sys.stderr)
        return code or 1
    return code


def _follow(inside: Leashed) -> int:
    """Until it ends; Ctrl-C has it clean up, and another one ends it at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell puts into the background ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return inside.wait()
    except KeyboardInterrupt:
        inside.signal(signal.SIGINT)
    try:
        inside.wait(CLEAN_UP_SECONDS)
    except (KeyboardInterrupt, TimeoutError):
        inside.kill()
    return INTERRUPTED


def _leftovers(folder: Path) -> list[str]:
    """Where there is no process and no mount, there are no namespaces either, nor what is in them."""
    mark, found = str(folder), []
    for process in psutil.process_iter():
        try:
            if mark in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(f"process {process.pid} ({process.name()})")
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    found += [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    return [*found, *([mark] if folder.exists() else [])]


if __name__ == "__main__":
    sys.exit(main())
