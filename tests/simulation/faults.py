"""How each fault of a plan is carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticdl.elastic.core.training_step import WorkerState
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.values import Phase
from tests.simulation.plan import Fault, Kind
from tests.simulation.unlike import Reading

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.masters import Master
    from tests.simulation.network import Link
    from tests.simulation.process import Process
    from tests.simulation.site import Site

# Of an older master from the cluster's API: less than a new one waits for the workers that the older one holds.
LONGEST_CUT = 3.0
_READINGS = tuple(Reading)
_ON_WORKERS = (
    Kind.KILL, Kind.LOSE_NODE, Kind.FREEZE, Kind.TERMINATE, Kind.RAISE, Kind.CRASH, Kind.EXIT, Kind.CUT, Kind.FLICKER,
    Kind.TEAR, Kind.BREAK, Kind.DRIFT,
)  # fmt: skip
_ON_MASTERS = (Kind.KILL_MASTER, Kind.AGED_MASTER, Kind.BLANK_MASTER, Kind.SECOND_MASTER)
_TERMINATIONS = (ExitCause.KILLED, ExitCause.PREEMPTED, ExitCause.EVICTED)


def plan_faults(site: Site) -> None:
    for fault in site.plan.faults:
        site.clock.after(fault.at, strike, site, fault)
    site.clock.after(site.plan.calm, _calm, site)


def strike(site: Site, fault: Fault) -> None:
    if site.ended is not None:
        return
    site.quiet_from = max(site.quiet_from, site.clock.now + fault.seconds)
    site.trace.note(f"FAULT: {fault.kind}")
    if fault.kind in _ON_WORKERS:
        processes = site.cluster.processes
        if processes:
            process = processes[fault.who % len(processes)]
            process.disturbed = True
            _strike_worker(site, process, fault)
    elif fault.kind in _ON_MASTERS:
        running = [master for master in site.masters if master.alive]
        if running:
            site.checks.master_disturbed = True
            _strike_master(site, running[-1], fault)
    else:
        _strike_site(site, fault)


def strike_at_end(site: Site, process: Process, kind: Kind) -> None:
    """Soon after the worker's last step."""
    site.quiet_from = max(site.quiet_from, site.clock.now + site.plan.export)
    site.trace.note(f"FAULT: {kind} (worker {process.worker_id})")
    after = site.plan.export * process.draw.random()
    if kind is Kind.TERMINATE_AT_END:
        site.clock.after(after, site.cluster.evict, process.worker_id, ExitCause.PREEMPTED)
    else:
        site.clock.after(after, process.end, ExitCause.KILLED, -9)


def _calm(site: Site) -> None:
    """Nothing fails any more; what is broken comes back."""
    site.trace.note("no more faults")
    site.cluster.set_places(max(site.plan.workers, site.limits.minimum))


def _strike_worker(site: Site, struck: Process, fault: Fault) -> None:
    """Of a worker of several processes one of them, or the one that speaks for them."""
    group, process = struck.group, struck
    if group is not None:
        number = fault.who // 10 % (group.size + 1)
        if number == group.size:
            _strike_group(site, group, struck, fault)
            return
        process = group.processes[number]
    match fault.kind:
        case Kind.KILL if fault.after:
            process.fuse = fault.after
        case Kind.KILL:
            process.end(ExitCause.KILLED, -9)
        case Kind.LOSE_NODE:
            struck.vanish(fault.seconds)
        case Kind.FREEZE:
            process.freeze(fault.seconds)
        case Kind.TERMINATE if group is not None:
            process.call(process.terminated)
        case Kind.TERMINATE:
            site.cluster.evict(process.worker_id, _TERMINATIONS[fault.who % len(_TERMINATIONS)])
        case Kind.RAISE | Kind.CRASH | Kind.EXIT:
            process.to_raise = fault.kind.name.lower()
            if fault.kind is Kind.RAISE:
                site.checks.accept(Phase.FAILED)
        case Kind.CUT | Kind.FLICKER:
            _cut(process.session, site, fault)
        case Kind.TEAR:
            process.collectives.tear(process.core.inside)
        case Kind.BREAK:
            process.collectives.break_world(process.core.inside)
        case Kind.DRIFT:
            trains = process.core.state is WorkerState.TRAINING and not process.core.position.is_reduced
            if trains and process.state.weights is process.state.buffers:
                site.checks.drifts(process, process.state.weights.other())


def _cut(link: Link, site: Site, fault: Fault) -> None:
    link.blocked_until = site.clock.now + (fault.seconds if fault.kind is Kind.CUT else 0.0)
    if link.stream is not None:
        link.stream.close(noticed=0.02 if fault.who % 2 else 1.0)


def _strike_group(site: Site, group: Group, struck: Process, fault: Fault) -> None:
    """The process that speaks for the worker's processes. What can't befall it by itself is SIGTERM to the whole worker instead."""
    match fault.kind:
        case Kind.KILL | Kind.CRASH:
            group.kill(ExitCause.KILLED, -9)
        case Kind.FREEZE:
            group.freeze(fault.seconds)
        case Kind.LOSE_NODE:
            struck.vanish(fault.seconds)
        case Kind.CUT | Kind.FLICKER:
            _cut(struck.to_master, site, fault)
        case _:
            site.cluster.evict(struck.worker_id, _TERMINATIONS[fault.who % len(_TERMINATIONS)])


def _strike_master(site: Site, master: Master, fault: Fault) -> None:
    saved = site.store.saved
    if fault.kind is Kind.SECOND_MASTER:
        master.cut_off = site.checks.master_cut_off = True
        site.clock.after(min(fault.seconds + 0.5, LONGEST_CUT), _reconnect, site, master)
        site.start_master(saved[-1] if saved else None)
        return
    site.checks.saves_lost |= fault.kind is not Kind.KILL_MASTER
    if fault.kind is Kind.BLANK_MASTER:
        saved.clear()
    elif fault.kind is Kind.AGED_MASTER and len(saved) > 1:
        del saved[-(1 + fault.who % 3) :]
    if fault.after:
        master.fuse = fault.after
    else:
        master.die("killed")


def _reconnect(site: Site, master: Master) -> None:
    master.cut_off = False
    if master.generation < site.store.starts:
        master.die("another has taken over")


def _strike_site(site: Site, fault: Fault) -> None:
    until = site.clock.now + fault.seconds
    match fault.kind:
        case Kind.SLOW_START:
            site.slow_starts += 1
        case Kind.TERMINATE_AT_END | Kind.KILL_AT_END:
            site.at_end.append(fault.kind)
        case Kind.PLACES:
            site.cluster.set_places(fault.who % site.plan.workers)
            site.clock.after(fault.seconds, site.cluster.set_places, site.plan.workers)
        case Kind.SCALE:
            minimum = 1 + fault.who % 2
            maximum = min(minimum + fault.who // 10 % 4, site.plan.workers)
            site.limits = WorkerRange(minimum=min(minimum, maximum), maximum=maximum)
            site.command(e.ScaleRequested(site.limits))
        case Kind.OTHER_DATA:
            site.other_data, site.other_data_until = _READINGS[fault.who % len(_READINGS)], until
        case Kind.STOP:
            site.checks.accept(Phase.STOPPED)
            site.command(e.StopRequested("simulated", checkpoint=fault.who % 2 > 0, now=fault.who % 10 == 0))
        case Kind.STORE_DOWN:
            site.checks.master_disturbed = True
            site.store.down_until = until
        case Kind.REJECT:
            site.cluster.rejects_until, site.cluster.other_node = until, fault.who % 2 > 0
        case Kind.EVICT_ALL:
            site.cluster.evicts_until = until
        case Kind.TERMINATE_ALL:
            for process in site.cluster.processes:
                process.disturbed = True
                site.cluster.evict(process.worker_id, ExitCause.PREEMPTED)
