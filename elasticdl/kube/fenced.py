"""A ConfigMap that only one master of a job may write.

Writing is fenced: a master that finds another one's mark there has been replaced, as after its node was cut off, and
writes no more. A write that may or may not have been done is done again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from elasticdl.common.errors import ReplacedError
from elasticdl.kube.api_error import CONFLICT, ApiError
from elasticdl.kube.client import Client
from elasticdl.kube.manifests.packed_state import HOLDER

ATTEMPTS = 5
Manifest = dict[str, Any]


class FencedConfigMap:
    """``holder``: the mark of this master."""

    def __init__(self, client: Client, name: str, holder: str) -> None:
        self._client = client
        self._name = name
        self._holder = holder
        self._version = ""  # empty: to be asked for

    async def claim(self) -> Manifest:
        """Take over whatever is there, which is returned. From then on an earlier master can't write any more.

        Raises:
            ApiError: it could not be done, or nobody knows.
        """
        return await self._send({"metadata": {"annotations": {HOLDER: self._holder}}})

    async def patch(self, change: Manifest) -> None:
        """Change what this master has written last.

        Raises:
            ReplacedError: another master has taken it over.
            OSError: it could not be done, or nobody knows.
        """
        for _ in range(ATTEMPTS):
            try:
                version = self._version or await self._ask_for_version()
                await self._send({**change, "metadata": {"resourceVersion": version}})
            except ApiError as failure:
                if failure.status != CONFLICT:
                    raise OSError(str(failure)) from failure
            else:
                return
        raise OSError(f"the ConfigMap {self._name} changes under every attempt to write it")

    async def _send(self, change: Manifest) -> Manifest:
        self._version = ""  # nobody knows, until there is an answer
        done = await asyncio.to_thread(self._client.patch, "ConfigMap", self._name, change)
        self._version = done["metadata"]["resourceVersion"]
        return done

    async def _ask_for_version(self) -> str:
        found = await asyncio.to_thread(self._client.read, "ConfigMap", self._name)
        holder = (found["metadata"].get("annotations") or {}).get(HOLDER, "")
        if holder != self._holder:
            raise ReplacedError(f"another master has taken over: pod {holder}")
        return str(found["metadata"]["resourceVersion"])
