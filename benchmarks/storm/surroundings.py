"""What can be cut off and filled up: hosts of one network namespace each, the ways between them, and a small disk.

All of the network is gone when the processes are that hold the namespaces: the kernel takes interfaces and addresses along.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.processes import Failed, Processes, wait_until
from benchmarks.storm.lasting_master import Host

# Out of a range that is meant for tests and routed nowhere.
MASTER = Host("198.18.0.1")
SWITCH = "switch"
# Nobody has this address: what is sent to it is lost without a word, as with a cut cable.
NOWHERE = "02:00:00:00:00:01"
UP_SECONDS = 30.0
IP_SECONDS = 20.0
DISK_BYTES = 1 << 20
MOUNT_SECONDS = 20.0
# States of sockets that somebody still uses, in the kernel's tables.
IN_USE = {"01": "connected", "0A": "listening"}


class Network:
    """To be made in a network namespace of one's own, in which the master then is."""

    def __init__(self, hosts: int, processes: Processes) -> None:
        """``processes`` hold the namespaces.

        Raises:
            Failed: the namespaces do not come up, or their interfaces can't be made.
        """
        up = ["link set lo up", f"link add {SWITCH} type bridge", f"link set {SWITCH} up"]
        _ip(MASTER, [*up, f"addr add {MASTER.address}/24 dev {SWITCH}"])
        self.hosts = [self._add_host(number, processes) for number in range(2, 2 + hosts)]

    def cut(self, one: Host, other: Host) -> None:
        """Nothing passes between the two any more, and neither is told."""
        for here, there in ((one, other), (other, one)):
            _ip(here, [f"neigh replace {there.address} lladdr {NOWHERE} dev {_interface(here)} nud permanent"])

    def heal(self, one: Host, other: Host) -> None:
        for here, there in ((one, other), (other, one)):
            _ip(here, [f"neigh del {there.address} dev {_interface(here)}"])

    def sockets_in_use(self) -> list[str]:
        """TCP sockets that listen or are connected, on the hosts or at the master."""
        found = []
        for host in (MASTER, *self.hosts):
            for line in Path(f"/proc/{host.pid or os.getpid()}/net/tcp").read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                if state in IN_USE:
                    found.append(f"{IN_USE[state]} at {host.address}: {local} {remote}")
        return found

    def _add_host(self, number: int, processes: Processes) -> Host:
        holder = processes.start(f"host-{number}", ["unshare", "--net", "sleep", "infinity"])
        own, what = os.readlink("/proc/self/ns/net"), f"a network namespace of its own for process {holder.pid}"
        wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, UP_SECONDS, what)
        host, port = Host(f"198.18.0.{number}", holder.pid), f"port{number}"
        pair = f"link add {port} type veth peer name {_interface(host)} netns {host.pid}"
        _ip(MASTER, [pair, f"link set {port} master {SWITCH} up"])
        up = [f"link set {each} up" for each in ("lo", _interface(host))]
        _ip(host, [*up, f"addr add {host.address}/24 dev {_interface(host)}"])
        return host


def _interface(host: Host) -> str:
    return "eth0" if host.pid else SWITCH


def _ip(host: Host, lines: list[str]) -> None:
    """Have `ip` do all of it, in the host's network namespace.

    Raises:
        Failed: it can't.
    """
    command = ["nsenter", f"--net=/proc/{host.pid or os.getpid()}/ns/net", "ip", "-batch", "-"]
    how: Any = {"capture_output": True, "text": True, "timeout": IP_SECONDS, "check": False}
    done = subprocess.run(command, input="\n".join(lines), **how)
    if done.returncode:
        raise Failed(f"ip failed: {done.stderr.strip()}; it was told: {'; '.join(lines)}")


class Disk:
    """To be made in a mount namespace of one's own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder))
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """To the last byte."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        _run("umount", str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=MOUNT_SECONDS, stdin=subprocess.DEVNULL)
