"""Sending a request to a replica, and what became of it.

A request is sent once. Only one that no replica has taken, as the connection was refused before anything was sent, is tried with
another replica, which is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.experiments.serving.rotation import Rotation
from benchmarks.experiments.serving.server import HEALTH, PREDICT

ANSWER_SECONDS = 30.0
HEALTH_SECONDS = 2.0
LOOK_SECONDS = 0.2


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
