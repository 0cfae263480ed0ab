"""What a node of either kind is told when it starts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Written as JSON by the cluster, read by the node; paths are absolute.

    In its folder, which is the node's alone, `kubelet.kubeconfig` makes it a node, with `kubelet.crt` and `kubelet.key`;
    with `services.kubeconfig` it sees all Services and pods.
    """

    name: str
    server: str
    authority: str  # a file: the cluster's certificate
    folder: str
    logs: str
    gpus: int

    @property
    def own(self) -> Path:
        return Path(self.folder)

    def write(self) -> Path:
        file = self.own / "settings.json"
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def told(cls) -> Self:
        """Of the file that this program's command line names."""
        return cls(**json.loads(Path(sys.argv[1]).read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNodeSettings(NodeSettings):
    environment: dict[str, str]  # what every container's image would set
