"""What becomes of a training when that is killed on which its workers rely to find each other.

    python -m benchmarks.coordinator --systems torchrun,horovodrun,torchft      # takes 8 minutes

Three workers train. Then SIGKILL goes to torchrun's oldest agent (it serves the store; its worker goes, too, as with a lost machine), to
horovodrun, or to torchft's lighthouse. For ``--watch`` seconds, which are more than any timeout of theirs, it is counted who makes steps.
elasticdl's masters are killed on a cluster and on Slurm by tests (`tests/e2e/test_kubernetes.py`, `test_slurm.py`).
"""

from __future__ import annotations

import sys
import time

import psutil

from benchmarks.harness import Parser, Results, add_out, names, show_table
from benchmarks.peers.run import PeerRun
from benchmarks.peers.systems import SYSTEMS
from benchmarks.processes import Failed, scratch

PEERS = ("torchrun", "horovodrun", "torchft")
WORKERS = 3
STEPS = 10  # that each worker has made before


def watch(system: str, seconds: float) -> dict[str, int | float]:
    with scratch() as processes:
        run = PeerRun(SYSTEMS[system](), processes)
        run.start("1m", WORKERS)
        run.settle(STEPS)
        workers = run.members
        coordinator = psutil.Process(processes.pids[0])
        agents_worker = coordinator.children(recursive=True) if system == "torchrun" else []
        victims = [coordinator, *agents_worker]
        for victim in victims:
            victim.kill()
        killed = time.monotonic()
        time.sleep(seconds)
        after = {pid: [step for step in steps if step.time > killed] for pid, steps in run.logs.read().items()}
        made = [step for steps in after.values() for step in steps]
        left = workers - {victim.pid for victim in victims}
        return {
            "trained_for": round(max((step.time for step in made), default=killed) - killed, 1),
            "steps_after": len({step.number for step in made}),
            "workers_left": sum(psutil.pid_exists(pid) for pid in left),
            "workers_new": len(after.keys() - workers),
        }


def main() -> int:
    parser = Parser("coordinator", __doc__)
    parser.add_argument("--systems", type=names, default=list(PEERS), help="which, separated by commas")
    parser.add_argument("--watch", type=float, default=120.0, help="seconds after the kill")
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, systems=PEERS)
    results, rows = Results("coordinator", args.out), []
    for system in args.systems:
        if missing := SYSTEMS[system]().missing():
            print(f"{system} is left out: {missing}", file=sys.stderr)
            continue
        try:
            found = watch(system, args.watch)
        except Failed as error:
            print(f"{system}: {error}", file=sys.stderr)
            continue
        versions = SYSTEMS[system]().versions()
        results.add("coordinator killed", system=system, watched=args.watch, versions=versions, **found)
        rows.append((system, *map(str, found.values())))
    columns = ("system", "trains on for, s", "steps", "workers left of those not killed", "new workers")
    show_table(f"{WORKERS} workers, {args.watch:g} s after the kill", columns, rows)
    print(f"in {results.path}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
