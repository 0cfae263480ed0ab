"""The network of a cluster: a switch in a namespace of its own, the host on one port of it, each node on another.

All of it is gone when the switch's process is: the kernel takes the interfaces, addresses and routes along.
"""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from tests.cluster.control_plane import ControlPlaneError, last_line, wait_for
from tests.cluster.processes import Leashed

MOST_NODES = 4
BRIDGE = "switch"
_UP_WITHIN_S = 10.0
_COMMAND_WITHIN_S = 20.0
_FIRST_NODE = 10


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one cluster, out of a range that is meant for tests and routed nowhere."""

    number: int

    @property
    def interface(self) -> str:
        """The host's port of the switch."""
        return f"elasticdl{self.number}"

    @property
    def host(self) -> str:
        return f"198.18.{self.number}.1"

    def node(self, place: int) -> str:
        return f"198.18.{self.number}.{_FIRST_NODE + place}"

    def pods(self, place: int) -> str:
        """The addresses of a node's pods."""
        return str(list(IPv4Network(f"198.19.{self.number}.0/24").subnets(new_prefix=26))[place])

    def routes_to_pods(self, besides: int | None = None) -> list[str]:
        places = (place for place in range(MOST_NODES) if place != besides)
        return [f"route add {self.pods(place)} via {self.node(place)}" for place in places]


class Network:
    """The switch, and the host's way to it; ``pid``: of a process in the switch's namespace."""

    def __init__(self, plan: Addresses, process: Leashed, pid: int) -> None:
        self.plan = plan
        self.pid = pid
        self._process = process

    @classmethod
    def open(cls, folder: Path) -> Network:
        """A network that no other cluster has; ``folder`` is for its log.

        Raises:
            ControlPlaneError: it can't be made; nothing is left of it.
        """
        file, log = folder / "switch.pid", folder / "switch.log"
        command = ["unshare", "--net", "sh", "-c", 'echo $$ > "$0"; exec sleep infinity', str(file)]
        process = Leashed.start(command, log, folder=folder)

        def is_up() -> bool:
            return file.exists() and file.read_text().endswith("\n")

        try:
            wait_for(is_up, lambda: f"no network namespace: {last_line(log)}", _UP_WITHIN_S, poll=0.01)
            pid = int(file.read_text())
            plan = _connect_host(pid)
            in_namespace(pid, [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
            in_namespace(pid, [f"link set host master {BRIDGE}", "link set host up"])
            own = [f"link set {plan.interface} up", f"address add {plan.host}/24 dev {plan.interface}"]
            run_ip(own + plan.routes_to_pods())
        except BaseException:
            process.stop()
            raise
        return cls(plan, process, pid)

    def close(self) -> None:
        self._process.stop()


def run_ip(lines: list[str], *prefix: str) -> None:
    """Have `ip` do all of it.

    Raises:
        ControlPlaneError: it can't.
    """
    command, given = [*prefix, "ip", "-batch", "-"], "\n".join(lines)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_COMMAND_WITHIN_S, check=False)
    if done.returncode:
        raise ControlPlaneError(f"ip failed: {done.stderr.strip()}; it was told: {'; '.join(lines)}")


def in_namespace(pid: int, lines: list[str]) -> None:
    """The same in the network namespace of a process."""
    run_ip(lines, "nsenter", f"--net=/proc/{pid}/ns/net")


def _connect_host(pid: int) -> Addresses:
    """Make the host's interface, whose name reserves the addresses; both end with the switch."""
    # Not by the generator of all: two test processes in which something has seeded it would take the same.
    for plan in map(Addresses, random.SystemRandom().sample(range(256), 20)):
        try:
            run_ip([f"link add {plan.interface} type veth peer name host netns {pid}"])
        except ControlPlaneError as error:  # another cluster has the number
            last = error
        else:
            return plan
    raise last
