"""What a node with a kubelet is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.full.network import Addresses
from tests.cluster.settings import NodeSettings


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
