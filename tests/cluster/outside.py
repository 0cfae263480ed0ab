"""A cluster of somebody else's, in place of the one that the tests start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kubernetes import client, config


@dataclass(frozen=True, slots=True)
class OutsideCluster:
    """What tests may ask of a cluster whose machines are not theirs; the twin of ``Cluster``."""

    kubeconfig: Path
    # One that has a shell and Python; the nodes of ``Cluster`` take any name.
    image: str

    def client(self) -> client.ApiClient:
        """The official client, as the user of the kubeconfig's current context."""
        found: client.ApiClient = config.new_client_from_config(str(self.kubeconfig))
        return found
