"""How long the survivors pause when workers come and go, and what the pause consists of.

    python -m benchmarks.rescale [--repetitions 10] [--workers 2,3,4,5] [--models 1m,2.6m,25m]
                                 [--events grow,sigterm,sigkill,sigstop] [--frameworks torch,keras]
                                 [--collectives horovod,torch]
                                 [--peers torchrun,horovodrun,torchft | none]

With N workers, grow is N-1 to N and every other event N to N-1. Peers, which train with PyTorch, go through the same with
the same models.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.elastic_run import EVENTS, PROGRAMS, Change, ElasticRun
from benchmarks.harness import Results, add_out, busy_cores, describe_machine, names, numbers
from benchmarks.models import LAYERS
from benchmarks.peers import PEERS
from benchmarks.peers.port import PeerChange
from benchmarks.peers.run import run_peer
from benchmarks.processes import Failed, Processes, scratch
from benchmarks.rescale_tables import Key, show_comparison, show_elastic, show_peers

COLLECTIVES = ("horovod", "torch")


def main() -> int:
    args = parse()
    results = Results("rescale", args.out)
    print(describe_machine(results.machine))
    changes: dict[Key, list[Change]] = defaultdict(list)
    failures: dict[Key, int] = defaultdict(int)
    measured = itertools.product(args.frameworks, args.models, args.workers, args.events, args.collectives)
    for framework, model, workers, event, collective in measured:
        measure(Key(event, workers, model, framework, collective), args, results, changes, failures)
    show_elastic(changes, failures, results)
    peers = measure_peers(args, results)
    show_peers(peers, results)
    show_comparison(changes, peers, results)
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--workers", type=numbers, default=[2, 3, 4, 5])
    parser.add_argument("--models", type=names, default=list(LAYERS), help=",".join(LAYERS))
    parser.add_argument("--events", type=names, default=list(EVENTS), help=",".join(EVENTS))
    parser.add_argument("--frameworks", type=names, default=["torch", "keras"], help=",".join(PROGRAMS))
    parser.add_argument("--collectives", type=names, default=list(COLLECTIVES), help=",".join(COLLECTIVES))
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of steady training before an event")
    parser.add_argument("--heartbeat_timeout", type=float, default=1.5, help="of the job in which a worker is stopped")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"none, or some of {','.join(PEERS)}")
    parser.add_argument("--peer_workers", type=numbers, default=[3])
    parser.add_argument("--peer_models", type=names, help="default: as --models")
    parser.add_argument("--peer_repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments within a step at which events come")
    add_out(parser)
    args = parser.parse_args()
    args.peers = [] if args.peers in ("", "none") else names(args.peers)
    args.peer_models = args.peer_models or args.models
    models = [*args.models, *args.peer_models]
    allowed = (
        (args.events, EVENTS),
        (models, LAYERS),
        (args.frameworks, PROGRAMS),
        (args.collectives, COLLECTIVES),
        (args.peers, PEERS),
    )
    for given, known in allowed:
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    if min(args.workers) < 2:
        parser.error("--workers: at least 2, since one is taken away")
    return args


def measure(
    key: Key,
    args: argparse.Namespace,
    results: Results,
    changes: dict[Key, list[Change]],
    failures: dict[Key, int],
) -> None:
    """All repetitions of one event in one job; a job that fails is recorded, and a new one goes on in its place."""
    rng, number = random.Random(args.seed), 0
    while number < args.repetitions:
        try:
            with scratch(keep_at(results, key)) as processes:
                run = elastic_run(key, args, processes)
                run.start()
                for number in range(number, args.repetitions):  # noqa: B020 (a new job goes on where the last one failed)
                    before = busy_cores(0.2)
                    for change in run.repeat(key.event, number, args.settle, rng):
                        changed = replace(key, event=change.event)
                        changes[changed].append(change)
                        fields = {"repetition": number, "provoked": key.event, "busy_cores_before": before}
                        results.add("change", **{**asdict(key), **asdict(change)}, **fields)
                        say(changed, number, change)
                run.stop()
                return
        except Failed as failure:
            failures[key] += 1
            results.add("failure", **asdict(key), reason=str(failure))
            print(f"{key}: FAILED: {failure}", flush=True)
            number += 1


def elastic_run(key: Key, args: argparse.Namespace, processes: Processes) -> ElasticRun:
    options = {"collective": key.collective}
    if key.event == "sigstop":
        options["heartbeat_timeout"] = str(args.heartbeat_timeout)
    return ElasticRun(key.framework, key.model, key.workers, processes, options)


def say(key: Key, number: int, change: Change) -> None:
    pauses = ", ".join(f"{1e3 * pause:.0f}" for pause in change.gap.pauses)
    print(f"{key} #{number + 1}: pauses {pauses} ms, step {1e3 * change.gap.ordinary:.0f} ms", flush=True)


def keep_at(results: Results, key: Key) -> Path:
    """Where the logs of what fails go: beside the results."""
    return (
        results.path.parent
        / f"failed-{key.framework}-{key.collective}-{key.event}-{key.workers}-{key.model}-{time.time():.0f}"
    )


def measure_peers(args: argparse.Namespace, results: Results) -> dict[tuple[str, Key], list[PeerChange]]:
    found: dict[tuple[str, Key], list[PeerChange]] = defaultdict(list)
    for name in args.peers:
        peer = PEERS[name]()
        if reason := peer.missing():
            print(f"{name}: not installed: {reason}")
            results.add("peer_missing", peer=name, reason=reason)
            continue
        for model in args.peer_models:
            for workers in args.peer_workers:
                key = Key("", workers, model)
                try:
                    with scratch(keep_at(results, key)) as processes:
                        for change in run_peer(peer, model, workers, args.peer_repetitions, processes):
                            found[name, Key(change.event, workers, model)].append(change)
                            results.add("peer_change", peer=name, model=model, workers=workers, **asdict(change))
                            print(
                                f"{name} {change.event} {model} {workers}: {max(change.gap.pauses):.2f} s", flush=True
                            )
                except Failed as failure:
                    results.add("peer_failure", peer=name, model=model, workers=workers, reason=str(failure))
                    print(f"{name} {model} {workers}: FAILED: {failure}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
