"""The tables of `benchmarks.rescale`, and their rows as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product

from benchmarks.elastic_run import Change
from benchmarks.harness import Results, Summary, show_table, summarise
from benchmarks.peers.port import PeerChange
from elasticdl.job.event_catalogue import PAUSE_PARTS

GROWING = ("grow", "rejoin")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What is measured: an event, the larger number of workers, a model, with which framework, and what sums gradients."""

    event: str
    workers: int
    model: str
    framework: str = "torch"
    collective: str = ""  # none of a peer

    def __str__(self) -> str:
        fewer = self.workers - 1
        way = f"{fewer}->{self.workers}" if self.event in GROWING else f"{self.workers}->{fewer}"
        return " ".join(filter(None, (self.framework, self.collective, self.model, self.event, way)))


PeerChanges = Mapping[tuple[str, Key], Sequence[PeerChange]]


def pauses(changes: Sequence[Change] | Sequence[PeerChange]) -> Summary:
    """Over all survivors of all repetitions."""
    return summarise(chain.from_iterable(change.gap.pauses for change in changes))


def show_elastic(changes: Mapping[Key, Sequence[Change]], failures: Mapping[Key, int], results: Results) -> None:
    rows, splits = [], []
    for key in sorted(
        {*changes, *failures}, key=lambda key: (key.framework, key.event, key.model, key.workers, key.collective)
    ):
        samples, failed = changes.get(key, ()), failures.get(key, 0)
        if not samples:
            rows.append([str(key), "0", *("-" * 9), str(failed)])
            continue
        pause = pauses(samples)
        reported = summarise(part["total"] for change in samples for part in change.parts)
        parts = {name: summarise(part[name] for change in samples for part in change.parts) for name in PAUSE_PARTS}
        step = summarise(change.gap.ordinary for change in samples)
        counts = {name: sum(getattr(change.gap, name) for change in samples) for name in ("redone", "lost")}
        counts["torn"] = sum(change.torn for change in samples)
        fields = {"repetitions": len(samples), "failed": failed, "pause": pause, "reported": reported, "step": step}
        traces = {name: max(change.traces[name] for change in samples) for name in samples[0].traces}
        fields |= {"traces": traces, "worlds_seen": max(change.worlds_seen for change in samples)}
        results.add("summary", **asdict(key), **fields, parts=parts, **counts)
        shown = [_ms(value) for value in (pause.median, pause.p95, pause.minimum, pause.maximum, step.median)]
        traced = str(max(traces.values(), default="-"))
        rows.append([str(key), str(len(samples)), *shown, *map(str, counts.values()), traced, str(failed)])
        splits.append([str(key), *(_ms(parts[name].median) for name in PAUSE_PARTS), _ms(reported.median)])
    columns = ["event", "n", "median", "p95", "min", "max", "step", "redone", "lost", "torn", "traces", "failed"]
    show_table("Pause of the survivors, ms (step logs, less an ordinary step)", columns, rows)
    show_table("Where it goes, ms (medians, as reported)", ["event", *PAUSE_PARTS, "total"], splits)


def show_peers(peers: PeerChanges, results: Results) -> None:
    rows = []
    for (name, key), samples in peers.items():
        pause = pauses(samples)
        redone, restarted = (sum(change.gap.redone for change in samples), sum(c.restarted for c in samples))
        results.add("peer_summary", peer=name, **asdict(key), pause=pause, redone=redone, restarted=restarted)
        shown = [f"{value:.2f}" for value in (pause.median, pause.p95, pause.minimum, pause.maximum)]
        rows.append([name, str(key), str(len(samples)), *shown, str(redone), str(restarted)])
    if rows:
        columns = ["peer", "event", "n", "median", "p95", "min", "max", "steps redone", "restarted"]
        show_table("Peers: pause of the survivors, s", columns, rows)


def show_comparison(changes: Mapping[Key, Sequence[Change]], peers: PeerChanges, results: Results) -> None:
    rows = []
    for ((name, key), samples), (key_of_own, own) in product(peers.items(), changes.items()):
        if replace(key_of_own, collective="") != key:
            continue
        ratio = pauses(samples).median / pauses(own).median
        results.add("ratio", peer=name, **asdict(key_of_own), ratio=ratio)
        rows.append(
            [str(key_of_own), name, f"{pauses(samples).median:.2f}", f"{pauses(own).median:.3f}", f"{ratio:.1f}"]
        )
    if rows:
        columns = ["event", "peer", "peer s", "elasticdl s", "times as long"]
        show_table("Median pause, peer against elasticdl", columns, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"
