"""A node: `python -m tests.cluster.full.node settings.json`, as the first process of namespaces of its own.

Prepares them, starts the programs, answers for names, and ends when one of the programs does; the rest ends with it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

from tests.cluster.api import Api
from tests.cluster.control_plane import SERVICES
from tests.cluster.full import configuration, names
from tests.cluster.full.images import runtime_spec
from tests.cluster.full.leftovers import HIERARCHIES, make_groups
from tests.cluster.full.network import BRIDGE, in_namespace, run_ip
from tests.cluster.full.settings import KubeletSettings

_CONTAINERD_WITHIN_S = 30.0
_COMMAND_WITHIN_S = 60.0
_POLL_S = 0.02
# What the kubelet wants the kernel to be set to.
_KERNEL = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


def main() -> int:
    settings = KubeletSettings.told()
    connect(settings)  # needs the switch's process, which our own /proc will not have
    make_groups(settings.group)
    # Of this node alone: the kubelet removes what it does not know.
    pod_logs = Path(settings.logs, "pods", settings.name)
    pod_logs.mkdir(exist_ok=True)
    mount_own(settings.own, pod_logs)
    node = NodePrograms(settings)
    node.start()
    return node.wait()


def connect(settings: KubeletSettings) -> None:
    """Be on the switch, and know the way to all pods and to Services; there is no other."""
    plan, name = settings.plan, settings.name
    run_ip([f"link add eth0 type veth peer name {name} netns /proc/{settings.switch}/ns/net"])
    in_namespace(settings.switch, [f"link set {name} master {BRIDGE}", f"link set {name} up"])
    own = ["link set lo up", "link set eth0 up", f"address add {settings.address}/24 dev eth0"]
    run_ip([*own, f"route add {SERVICES} dev eth0", *plan.routes_to_pods(besides=settings.place)])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def mount_own(folder: Path, logs: Path) -> None:
    """What the node sees of the machine's files, in its own mount namespace. The kubelet and containerd have places that no
    option moves, and write to the kernel's settings; here both are the node's own.

    ``logs``: the folder that pods' logs are written to, as they would be to /var/log/pods.
    """
    _mount("-t", "proc", "proc", "/proc")
    for name, value in _KERNEL.items():
        file = folder / "kernel" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        _mount("--bind", str(file), f"/proc/sys/{name}")
    for place in ("/run", "/var/log"):
        _mount("-t", "tmpfs", "tmpfs", place)
    for name in ("pods", "containers"):
        Path("/var/log", name).mkdir()
    _mount("--bind", str(logs), "/var/log/pods")
    _cover("/var/lib", folder / "var-lib")
    _mount_sysfs(folder)


def _cover(place: str, folder: Path) -> None:
    """What is there is seen as before, and what is written there goes below ``folder``."""
    for name in ("upper", "work"):
        (folder / name).mkdir(parents=True)
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir={place},upperdir={folder}/upper,workdir={folder}/work", place)


def _mount_sysfs(folder: Path) -> None:
    """Of this network namespace, with the control groups where they were."""
    aside = folder / "cgroup"
    aside.mkdir()
    _mount("--rbind", str(HIERARCHIES), str(aside))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(aside), str(HIERARCHIES))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], timeout=_COMMAND_WITHIN_S, check=True)


class NodePrograms:
    """The programs of a node; everything here runs in its namespaces."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._settings = settings
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        root = settings.root
        libraries = root / "usr/lib/x86_64-linux-gnu"
        own = [settings.own / "bin", Path(settings.programs)]
        places = [*own, root / "usr/bin", root / "usr/sbin", os.environ.get("PATH", os.defpath)]
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, places)),
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }

    def start(self) -> None:
        """Returns when all programs have been started, with all images there."""
        settings = self._settings
        self._link_iptables()
        self._start("kube-proxy", "--config", self._write("kube-proxy.yaml", configuration.kube_proxy(settings)))
        self._start_containerd()
        self._start(
            "kubelet",
            "--config=" + self._write("kubelet.yaml", configuration.kubelet(settings)),
            f"--kubeconfig={settings.own / 'kubelet.kubeconfig'}",
            f"--container-runtime-endpoint=unix://{settings.socket}",
            f"--hostname-override={settings.name}",
            f"--node-ip={settings.address}",
            f"--cert-dir={settings.own / 'pki'}",
            f"--root-dir={settings.own / 'kubelet'}",
            # The last but one of a pod that is over, too: its log may be asked for.
            "--maximum-dead-containers-per-container=2",
        )
        for archive in sorted(Path(settings.images).glob("*.tar")):
            known = ("--namespace", "k8s.io")  # to the kubelet
            self._run("ctr", "--address", settings.socket, *known, "images", "import", str(archive))
        services = Api(settings.own / "services.kubeconfig")
        threading.Thread(target=names.serve, args=(settings.address, services), daemon=True).start()
        settings.prepared.touch()

    def wait(self) -> int:
        """Bury whatever ends, as the first process has to, until one of the programs does; the exit status for that."""
        while True:
            pid, status = os.wait()
            for name, process in self._programs.items():
                if process.pid == pid:
                    print(f"{name} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
                    return 1

    def _start_containerd(self) -> None:
        settings = self._settings
        (settings.own / "cni").mkdir()
        self._write("cni/pods.conflist", configuration.pod_network(settings))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._write("runtime.json", json.dumps(runtime_spec(json.loads(self._run("ctr", "oci", "spec")), most)))
        self._start("containerd", "--config", self._write("containerd.toml", configuration.containerd(settings)))
        deadline = time.monotonic() + _CONTAINERD_WITHIN_S
        while not Path(settings.socket).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"containerd does not listen in {_CONTAINERD_WITHIN_S:g} s")
            time.sleep(_POLL_S)

    def _link_iptables(self) -> None:
        """The names that Debian's alternatives would make."""
        (self._settings.own / "bin").mkdir()
        for family, part in product(("iptables", "ip6tables"), ("", "-save", "-restore")):
            place = self._settings.own / "bin" / f"{family}{part}"
            place.symlink_to(self._settings.root / "usr/sbin/xtables-nft-multi")

    def _start(self, name: str, *arguments: str) -> None:
        own = Path(self._settings.programs) / name
        program = own if own.exists() else Path(self._settings.kubernetes) / name
        with Path(self._settings.logs, f"{self._settings.name}-{name}.log").open("ab") as log:
            self._programs[name] = subprocess.Popen(
                [str(program), *arguments], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _run(self, *command: str) -> str:
        how: Any = {"stdout": subprocess.PIPE, "text": True, "timeout": _COMMAND_WITHIN_S, "check": True}
        return str(subprocess.run(command, env=self._environment, **how).stdout)

    def _write(self, name: str, text: str) -> str:
        path = self._settings.own / name
        path.write_text(text)
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
