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
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.api import Api
from tests.cluster.control_plane import SERVICES, wait_for
from tests.cluster.full import configuration, names
from tests.cluster.full.configuration import KubeletSettings
from tests.cluster.full.images import runtime_spec
from tests.cluster.full.leftovers import HIERARCHIES, make_groups
from tests.cluster.full.network import BRIDGE, in_namespace, run_ip

_CONTAINERD_WITHIN_S = 30.0
_COMMAND_WITHIN_S = 60.0
# What the kubelet wants the kernel to be set to.
_KERNEL = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


def main() -> int:
    settings = KubeletSettings.told()
    connect(settings)  # needs the switch's process, which our own /proc will not have
    make_groups(settings.group)
    mount_own(settings)
    programs = NodePrograms(settings)
    programs.start()
    services = Api(settings.own / "services.kubeconfig")
    threading.Thread(target=names.serve, args=(settings.address, services), daemon=True).start()
    settings.prepared.touch()
    return programs.wait()


def connect(settings: KubeletSettings) -> None:
    """Be on the switch, and know the way to all pods and to Services; there is no other."""
    plan, name = settings.plan, settings.name
    run_ip([f"link add eth0 type veth peer name {name} netns /proc/{settings.switch}/ns/net"])
    in_namespace(settings.switch, [f"link set {name} master {BRIDGE}", f"link set {name} up"])
    own = ["link set lo up", "link set eth0 up", f"address add {settings.address}/24 dev eth0"]
    run_ip([*own, f"route add {SERVICES} dev eth0", *plan.routes_to_pods(besides=settings.place)])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def mount_own(settings: KubeletSettings) -> None:
    """What the node sees of the machine's files, in its own mount namespace. The kubelet and containerd have places that no
    option moves, and write to the kernel's settings; here both are the node's own.
    """
    folder = settings.own
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
    # Of this node alone: the kubelet removes what it does not know.
    pod_logs = Path(settings.logs, "pods", settings.name)
    pod_logs.mkdir(exist_ok=True)
    _mount("--bind", str(pod_logs), "/var/log/pods")
    # What is there is seen as before, and what is written there goes elsewhere.
    upper, work, groups = (folder / name for name in ("var-lib", "var-lib-work", "cgroup"))
    for made in (upper, work, groups):
        made.mkdir()
    options = f"lowerdir=/var/lib,upperdir={upper},workdir={work}"
    _mount("-t", "overlay", "overlay", "-o", options, "/var/lib")
    # Of this network namespace, with the control groups where they were.
    _mount("--rbind", str(HIERARCHIES), str(groups))
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount("--rbind", str(groups), str(HIERARCHIES))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], timeout=_COMMAND_WITHIN_S, check=True)


class NodePrograms:
    """The programs of a node; everything here runs in its namespaces."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._settings = settings
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        root = settings.root
        libraries = root / "usr/lib/x86_64-linux-gnu"
        own = [settings.own / "bin", settings.programs, settings.kubernetes, root / "usr/bin", root / "usr/sbin"]
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, [*own, os.environ.get("PATH", os.defpath)])),
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }

    def start(self) -> None:
        """Returns when all programs have been started, with all images there."""
        settings, own = self._settings, self._settings.own
        (own / "bin").mkdir()
        for family, part in product(("iptables", "ip6tables"), ("", "-save", "-restore")):  # as Debian's alternatives
            (own / "bin" / f"{family}{part}").symlink_to(settings.root / "usr/sbin/xtables-nft-multi")
        self._start("kube-proxy", f"--config={self._write('kube-proxy.yaml', configuration.kube_proxy(settings))}")
        self._start_containerd()
        self._start(
            "kubelet",
            f"--config={self._write('kubelet.yaml', configuration.kubelet(settings))}",
            f"--kubeconfig={own / 'kubelet.kubeconfig'}",
            f"--container-runtime-endpoint=unix://{settings.socket}",
            f"--hostname-override={settings.name}",
            f"--node-ip={settings.address}",
            f"--cert-dir={own / 'pki'}",
            f"--root-dir={own / 'kubelet'}",
            # The last but one of a pod that is over, too: its log may be asked for.
            "--maximum-dead-containers-per-container=2",
        )
        for archive in sorted(Path(settings.images).glob("*.tar")):
            known = ("--namespace", "k8s.io")  # to the kubelet
            self._run("ctr", "--address", settings.socket, *known, "images", "import", str(archive))

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
        self._write("runtime.json", runtime_spec(json.loads(self._run("ctr", "oci", "spec")), most))
        own = settings.own / "containerd.toml"
        own.write_text(configuration.containerd(settings))
        self._start("containerd", "--config", str(own))
        listens = Path(settings.socket).exists
        wait_for(listens, lambda: "containerd does not listen", _CONTAINERD_WITHIN_S, poll=0.02)

    def _start(self, name: str, *arguments: str) -> None:
        how: Any = {"env": self._environment, "stdin": subprocess.DEVNULL}
        with Path(self._settings.logs, f"{self._settings.name}-{name}.log").open("ab") as log:
            self._programs[name] = subprocess.Popen([name, *arguments], **how, stdout=log, stderr=log)

    def _run(self, *command: str) -> str:
        how: Any = {"stdout": subprocess.PIPE, "text": True, "timeout": _COMMAND_WITHIN_S, "check": True}
        return str(subprocess.run(command, env=self._environment, **how).stdout)

    def _write(self, name: str, content: dict[str, Any]) -> Path:
        """As YAML, or the part of it that is JSON."""
        path = self._settings.own / name
        path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content))
        return path


if __name__ == "__main__":
    sys.exit(main())
