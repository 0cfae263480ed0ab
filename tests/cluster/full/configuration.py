"""What a node with a kubelet is told at its start, and the configuration files that it makes of this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.full.images import PAUSE_IMAGE
from tests.cluster.full.network import Addresses
from tests.cluster.settings import NodeSettings

DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletSettings(NodeSettings):
    place: int  # among the nodes of the cluster
    network: int  # the number of its `Addresses`
    switch: int  # a process in the switch's network namespace, by its number on the host
    kubernetes: str  # the folder of kubelet and kube-proxy
    programs: str  # the folder of the others
    images: str

    @property
    def plan(self) -> Addresses:
        return Addresses(self.network)

    @property
    def address(self) -> str:
        return self.plan.node(self.place)

    @property
    def group(self) -> str:
        """Its control group, below each hierarchy's root."""
        return f"{self.plan.interface}-{self.name}"

    @property
    def root(self) -> Path:
        """Where Debian's packages have been unpacked."""
        return Path(self.programs) / "root"

    @property
    def prepared(self) -> Path:
        """Made by the node when all of its programs run and it has all images."""
        return self.own / "prepared"

    @property
    def socket(self) -> str:
        """Where containerd listens."""
        return f"{self.folder}/containerd.sock"


def containerd(settings: KubeletSettings) -> str:
    """What this machine may not let it do, negative OOM scores and AppArmor, is left out."""
    return f"""version = 3
root = "{settings.folder}/containerd"
state = "/run/containerd"
oom_score = 0

[grpc]
  address = "{settings.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{settings.folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{settings.root}/usr/lib/cni"]
    conf_dir = "{settings.folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{settings.folder}/runtime.json"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{settings.root}/usr/sbin/runc"
"""


def pod_network(settings: KubeletSettings) -> dict[str, Any]:
    """A bridge in the node; addresses are not translated, as every node and the host know the way to each pod."""
    ranges = {"ranges": [[{"subnet": settings.plan.pods(settings.place)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    addresses = {"type": "host-local", "dataDir": f"{settings.folder}/addresses", **ranges}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def kubelet(settings: KubeletSettings) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": settings.authority}},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.group}",
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        # It finds the kernel as it wants it, see `mounts`: it must not set anything that is the whole machine's.
        "protectKernelDefaults": True,
        "failCgroupV1": False,
        "resolvConf": "",
        "clusterDNS": [settings.address],
        "clusterDomain": DOMAIN,
        "readOnlyPort": 0,
        "syncFrequency": "2s",
        "nodeStatusUpdateFrequency": "2s",
        # The machine's disk and memory are not this cluster's to judge, and an image that is collected can't be pulled.
        "evictionHard": {"memory.available": "50Mi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }


def kube_proxy(settings: KubeletSettings) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": settings.address,
        "hostnameOverride": settings.name,
        "clientConnection": {"kubeconfig": f"{settings.folder}/services.kubeconfig"},
        # The sizes of these tables are the whole machine's.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
    }
