"""Plant faults into real jobs, one after the other, and see whether the right worker is named, and how soon.

    python -m benchmarks.faults [--faults spin,stop] [--workers 3] [--collective torch] [--out FILE]

Each job trains with short limits. After: seconds without progress, or a sign of life, until the journal tells of it; for slow
workers, for whom there is no limit, since the fault began. Exit code 0 only if each was noticed and named rightly.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.run import BY_NAME, FAULTS, Fault, Finding, failed, find
from benchmarks.harness import Parser, Results, add_out, names, show_table
from benchmarks.processes import Failed, scratch

PROGRESS_TIMEOUT, HEARTBEAT_TIMEOUT = 8.0, 5.0


def main() -> int:
    args = parse()
    results = Results("faults", args.out)
    limits = {"progress_timeout": args.progress_timeout, "heartbeat_timeout": args.heartbeat_timeout}
    findings = [measure(fault, limits, args, results) for fault in FAULTS if fault.name in args.faults]
    columns = ("fault", "after, s", "limit, s", "named", "what was told", "what was done")
    rows = [
        (f.words, f"{f.after:.1f}", _limit(BY_NAME[f.fault], limits), _verdict(f), f.told, f.done) for f in findings
    ]
    show_table(f"Faults in a job of {args.workers} workers", columns, rows)
    print(f"results: {results.path}")
    return 0 if all(finding.right for finding in findings) else 1


def parse() -> argparse.Namespace:
    every = [fault.name for fault in FAULTS]
    parser = Parser("faults", __doc__)
    parser.add_argument("--faults", type=names, default=every, help=",".join(every))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--collective", default="auto")
    parser.add_argument("--progress_timeout", type=float, default=PROGRESS_TIMEOUT)
    parser.add_argument("--heartbeat_timeout", type=float, default=HEARTBEAT_TIMEOUT)
    add_out(parser)
    args = parser.parse_args()
    parser.require_known(args, faults=every)
    if args.workers < 2:
        parser.error(f"--workers {args.workers}: at least 2, so that somebody waits")
    return args


def measure(fault: Fault, limits: dict[str, float], args: argparse.Namespace, results: Results) -> Finding:
    limits = {**limits, **({fault.limit: fault.seconds} if fault.seconds else {})}
    keep = Path(results.path).parent / f"failed-fault-{fault.name}-{time.time():.0f}"
    try:
        with scratch(keep) as processes:
            finding = find(fault, limits, args.workers, args.collective, processes)
    except Failed as failure:
        finding = failed(fault, failure)
    setting = {"workers": args.workers, "collective": args.collective, "limit": fault.limit}
    results.add("fault", **asdict(finding), **setting, seconds=_limit(fault, limits))
    print(
        f"{fault.name}: named after {finding.after:.1f} s, {_verdict(finding)}: {finding.told}; {finding.done}",
        flush=True,
    )
    return finding


def _verdict(finding: Finding) -> str:
    return "rightly" if finding.right else "WRONGLY"


def _limit(fault: Fault, limits: dict[str, float]) -> str:
    """At the latest it is named then; the job may have learnt a shorter one."""
    seconds = fault.seconds or limits.get(fault.limit)
    return f"{seconds:g}" if seconds else "none"


if __name__ == "__main__":
    sys.exit(main())
