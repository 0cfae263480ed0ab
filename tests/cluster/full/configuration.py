"""The configuration files of a node's programs, as text."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.cluster.full.images import PAUSE_IMAGE
from tests.cluster.full.settings import KubeletSettings

DOMAIN = "cluster.local"


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


def pod_network(settings: KubeletSettings) -> str:
    """A bridge in the node; addresses are not translated, as every node and the host know the way to each pod."""
    addresses = {
        "type": "host-local",
        "dataDir": f"{settings.folder}/addresses",
        "ranges": [[{"subnet": settings.plan.pods(settings.place)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]})


def kubelet(settings: KubeletSettings) -> str:
    configuration: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": settings.authority},
        },
        "authorization": {"mode": "Webhook"},
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
    return yaml.safe_dump(configuration)


def kube_proxy(settings: KubeletSettings) -> str:
    configuration: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": settings.address,
        "hostnameOverride": settings.name,
        "clientConnection": {"kubeconfig": f"{settings.folder}/services.kubeconfig"},
        # The sizes of these tables are the whole machine's.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
    }
    return yaml.safe_dump(configuration)
