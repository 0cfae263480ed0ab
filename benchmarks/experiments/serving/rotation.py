"""Which replica gets the next request: of those in rotation the one with the fewest under way. Pure.

A replica comes into rotation when the cluster calls it ready and it has answered a look at its health, and leaves it as soon as
its pod is to go; what is under way there is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.experiments.pods import Pod, Pods, owner_of


@dataclass(slots=True)
class _Place:
    under_way: int = 0
    healthy: bool = False
    turn: int = 0  # of all choices the last that fell on it


class Rotation:
    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._turn = 0

    def become(self, addresses: Mapping[str, str]) -> list[str]:
        """The addresses of the replicas that are ready, by pod; those of them that have to show their health yet."""
        present = set(addresses.values())
        self._places = {address: self._places.get(address, _Place()) for address in sorted(present)}
        return [address for address, place in self._places.items() if not place.healthy]

    def waits(self, address: str) -> bool:
        """Whether it would come into rotation if it were healthy."""
        return address in self._places and not self._places[address].healthy

    def admit(self, address: str) -> None:
        if address in self._places:
            self._places[address].healthy = True

    @property
    def size(self) -> int:
        return sum(place.healthy for place in self._places.values())

    def take(self, without: frozenset[str] = frozenset()) -> str | None:
        """Where to send a request, which counts as under way from now on; None: nowhere."""
        found = [
            (place.under_way, place.turn, address)
            for address, place in self._places.items()
            if place.healthy and address not in without
        ]
        if not found:
            return None
        _, _, address = min(found)
        self._turn += 1
        place = self._places[address]
        place.under_way, place.turn = place.under_way + 1, self._turn
        return address

    def give_back(self, address: str) -> None:
        if address in self._places:
            self._places[address].under_way -= 1


def ready_addresses(pods: Pods, app: str) -> dict[str, str]:
    """Of the pods of an app that are ready and not to go, by name."""
    return {name: pod["status"]["podIP"] for name, pod in pods.items() if owner_of(pod) == app and _is_ready(pod)}


def _is_ready(pod: Pod) -> bool:
    status = pod.get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return (
        conditions.get("Ready") == "True" and bool(status.get("podIP")) and "deletionTimestamp" not in pod["metadata"]
    )
