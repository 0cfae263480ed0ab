"""How each fault of a plan is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elasticdl.elastic.core.lifecycle import WorkerState
from elasticdl.job.spec import WorkerRange
from elasticdl.master.state import events as e
from elasticdl.master.state.events import ExitCause
from elasticdl.master.state.instructions import Phase
from tests.simulation.plan import Fault, Kind
from tests.simulation.unlike import Reading

if TYPE_CHECKING:
    from tests.simulation.masters import Master
    from tests.simulation.process import Process
    from tests.simulation.site import Site

# Of an older master from the cluster's API: less than a new one waits for the workers that the older one holds.
LONGEST_CUT = 3.0
_READINGS = tuple(Reading)
_TERMINATIONS = (ExitCause.KILLED, ExitCause.PREEMPTED, ExitCause.EVICTED)


def plan_faults(site: Site) -> None:
    for fault in site.plan.faults:
        site.clock.after(fault.at, strike, site, fault)
    site.clock.after(site.plan.calm, _calm, site)


def strike(site: Site, fault: Fault) -> None:
    if site.ended is not None:
        return
    site.quiet_from = max(site.quiet_from, site.clock.now + fault.seconds)
    if site.trace is not None:
        site.trace.note(f"FAULT: {fault.kind}")
    if (on_worker := _ON_WORKERS.get(fault.kind)) is not None:
        processes = site.cluster.processes
        if processes:
            process = processes[fault.who % len(processes)]
            process.disturbed = True
            on_worker(site, process, fault)
    elif (on_master := _ON_MASTERS.get(fault.kind)) is not None:
        running = [master for master in site.masters if master.alive]
        if running:
            site.checks.master_disturbed = True
            on_master(site, running[-1], fault)
    else:
        _ON_SITE[fault.kind](site, fault)


def strike_at_end(site: Site, process: Process, kind: Kind) -> None:
    """Soon after the worker's last step."""
    site.quiet_from = max(site.quiet_from, site.clock.now + site.plan.export)
    if site.trace is not None:
        site.trace.note(f"FAULT: {kind} (worker {process.worker_id})")
    after = site.plan.export * process.draw.random()
    if kind is Kind.TERMINATE_AT_END:
        site.clock.after(after, site.cluster.evict, process.worker_id, ExitCause.PREEMPTED)
    else:
        site.clock.after(after, process.end, ExitCause.KILLED, -9)


def _calm(site: Site) -> None:
    """Nothing fails any more; what is broken comes back."""
    if site.trace is not None:
        site.trace.note("no more faults")
    site.cluster.set_places(max(site.plan.workers, site.limits.minimum))


# ---- workers ----


def _kill(site: Site, process: Process, fault: Fault) -> None:
    if fault.after:
        process.fuse = fault.after
    else:
        process.end(ExitCause.KILLED, -9)


def _lose_node(site: Site, process: Process, fault: Fault) -> None:
    process.vanish(fault.seconds)


def _freeze(site: Site, process: Process, fault: Fault) -> None:
    process.freeze(fault.seconds)


def _terminate(site: Site, process: Process, fault: Fault) -> None:
    site.cluster.evict(process.worker_id, _TERMINATIONS[fault.who % len(_TERMINATIONS)])


def _raise(site: Site, process: Process, fault: Fault) -> None:
    process.to_raise = {Kind.RAISE: "raise", Kind.CRASH: "crash", Kind.EXIT: "exit"}[fault.kind]
    if fault.kind is Kind.RAISE:
        site.checks.accept(Phase.FAILED)


def _cut(site: Site, process: Process, fault: Fault) -> None:
    process.session.blocked_until = site.clock.now + (fault.seconds if fault.kind is Kind.CUT else 0.0)
    if process.session.stream is not None:
        process.session.stream.close(noticed=0.02 if fault.who % 2 else 1.0)


def _tear(site: Site, process: Process, fault: Fault) -> None:
    version = process.core.inside
    if fault.kind is Kind.TEAR:
        site.collectives.tear(version)
    else:
        site.collectives.break_world(version)


def _drift(site: Site, process: Process, fault: Fault) -> None:
    trains = process.core.state is WorkerState.TRAINING and not process.core.position.is_reduced
    if trains and process.state.weights is process.state.buffers:
        site.checks.drifts(process, process.state.weights.other())


# ---- masters ----


def _kill_master(site: Site, master: Master, fault: Fault) -> None:
    if fault.after:
        master.fuse = fault.after
    else:
        master.die("killed")


def _lose_saves(site: Site, master: Master, fault: Fault) -> None:
    site.checks.saves_lost = True
    if fault.kind is Kind.BLANK_MASTER:
        site.store.saved.clear()
    elif len(site.store.saved) > 1:
        del site.store.saved[-(1 + fault.who % 3) :]
    _kill_master(site, master, fault)


def _second_master(site: Site, master: Master, fault: Fault) -> None:
    master.cut_off = site.checks.master_cut_off = True
    site.clock.after(min(fault.seconds + 0.5, LONGEST_CUT), _reconnect, site, master)
    site.start_master(site.store.saved[-1] if site.store.saved else None)


def _reconnect(site: Site, master: Master) -> None:
    master.cut_off = False
    if master.generation < site.store.starts:
        master.die("another has taken over")


# ---- the rest ----


def _slow_start(site: Site, fault: Fault) -> None:
    site.slow_starts += 1


def _at_end(site: Site, fault: Fault) -> None:
    site.at_end.append(fault.kind)


def _places(site: Site, fault: Fault) -> None:
    site.cluster.set_places(fault.who % site.plan.workers)
    site.clock.after(fault.seconds, site.cluster.set_places, site.plan.workers)


def _scale(site: Site, fault: Fault) -> None:
    minimum = 1 + fault.who % 2
    maximum = min(minimum + fault.who // 10 % 4, site.plan.workers)
    site.limits = WorkerRange(minimum=min(minimum, maximum), maximum=maximum)
    site.command(e.ScaleRequested(site.limits))


def _other_data(site: Site, fault: Fault) -> None:
    site.other_data, site.other_data_until = _READINGS[fault.who % len(_READINGS)], site.clock.now + fault.seconds


def _reject(site: Site, fault: Fault) -> None:
    site.cluster.rejects_until, site.cluster.other_node = site.clock.now + fault.seconds, fault.who % 2 > 0


def _evict_all(site: Site, fault: Fault) -> None:
    site.cluster.evicts_until = site.clock.now + fault.seconds


def _stop(site: Site, fault: Fault) -> None:
    site.checks.accept(Phase.STOPPED)
    site.command(e.StopRequested("simulated", checkpoint=fault.who % 2 > 0, now=fault.who % 10 == 0))


def _store_down(site: Site, fault: Fault) -> None:
    site.checks.master_disturbed = True
    site.store.down_until = site.clock.now + fault.seconds


_ON_WORKERS: dict[Kind, Callable[[Site, Process, Fault], None]] = {
    Kind.KILL: _kill,
    Kind.LOSE_NODE: _lose_node,
    Kind.FREEZE: _freeze,
    Kind.TERMINATE: _terminate,
    Kind.RAISE: _raise,
    Kind.CRASH: _raise,
    Kind.EXIT: _raise,
    Kind.CUT: _cut,
    Kind.FLICKER: _cut,
    Kind.TEAR: _tear,
    Kind.BREAK: _tear,
    Kind.DRIFT: _drift,
}
_ON_MASTERS: dict[Kind, Callable[[Site, Master, Fault], None]] = {
    Kind.KILL_MASTER: _kill_master,
    Kind.AGED_MASTER: _lose_saves,
    Kind.BLANK_MASTER: _lose_saves,
    Kind.SECOND_MASTER: _second_master,
}
_ON_SITE: dict[Kind, Callable[[Site, Fault], None]] = {
    Kind.SLOW_START: _slow_start,
    Kind.TERMINATE_AT_END: _at_end,
    Kind.KILL_AT_END: _at_end,
    Kind.PLACES: _places,
    Kind.SCALE: _scale,
    Kind.OTHER_DATA: _other_data,
    Kind.STOP: _stop,
    Kind.STORE_DOWN: _store_down,
    Kind.REJECT: _reject,
    Kind.EVICT_ALL: _evict_all,
}
