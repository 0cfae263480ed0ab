"""Sending a request to a replica, and what became of it.

A replica comes into rotation when the cluster calls it ready and it has answered a look at its health, and leaves it as soon as
its pod is to go; what is under way there is finished. Of those in rotation the one with the fewest under way gets the next.
A request is sent once. Only one that no replica has taken, as the connection was refused before anything was sent, is tried with
another replica, which is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.experiments.pods import Pod, Pods, owner_of
from benchmarks.experiments.serving.server import HEALTH, PREDICT

ANSWER_SECONDS = 30.0
HEALTH_SECONDS = 2.0
LOOK_SECONDS = 0.2


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


@dataclass(frozen=True, slots=True)
class Reply:
    replica: str
    refused: int
    answer: int | None
    failure: str


class Frontend:
    """Balances requests over the replicas in rotation. Used in one loop, while its session is open."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._port = port
        self._admitted = asyncio.Condition()
        self.rotation = Rotation()

    async def admit_when_healthy(self, address: str) -> bool:
        """Into rotation with the replica, as soon as it answers; False: it went away before."""
        limit = aiohttp.ClientTimeout(HEALTH_SECONDS)
        while self.rotation.waits(address):
            try:
                async with self._session.get(self._url(address, HEALTH), timeout=limit) as response:
                    healthy = response.status == 200
            except (aiohttp.ClientError, TimeoutError):  # not yet
                healthy = False
            if healthy:
                async with self._admitted:
                    self.rotation.admit(address)
                    self._admitted.notify_all()
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def send(self, image: bytes) -> Reply:
        """Never raises for what goes wrong with the request: that is in the reply."""
        refusals: list[str] = []
        address = ""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    address = await self._take(refusals)
                    try:
                        return Reply(address, len(refusals), *await self._post(address, image))
                    except aiohttp.ClientConnectorError:  # nothing was sent
                        refusals.append(address)
                    finally:
                        self.rotation.give_back(address)
                    if refusals.count(address) > 1:  # so has everybody else
                        await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            where = f"from {address}" if address else "as no replica was in rotation"
            return Reply(address, len(refusals), None, f"no answer within {ANSWER_SECONDS:g} s {where}")

    async def _take(self, refusals: Sequence[str]) -> str:
        """One that has not refused, if there is any."""
        without = frozenset(refusals)
        async with self._admitted:
            return await self._admitted.wait_for(lambda: self.rotation.take(without) or self.rotation.take() or "")

    async def _post(self, address: str, image: bytes) -> tuple[int | None, str]:
        try:
            async with self._session.post(self._url(address, PREDICT), data=image) as response:
                if response.status != 200:
                    return None, f"{response.status} {(await response.text())[:100]}"
                return int((await response.json())["class"]), ""
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            return None, f"{type(error).__name__}: {error}"

    def _url(self, address: str, path: str) -> str:
        return f"http://{address}:{self._port}{path}"


def new_session() -> aiohttp.ClientSession:
    """A connection for each request: of one that is kept it would not be known whether a request was taken as it closed."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
