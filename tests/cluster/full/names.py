"""A small cluster DNS: the names of Services, asked of the API server whenever somebody asks for one.

Serves A records over UDP. Every other name does not exist: nothing leads out of the cluster.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.cluster.full.configuration import DOMAIN

PORT = 53
_NAME = re.compile(rf"(?:([\w-]+)\.)?([\w-]+)\.([\w-]+)\.svc\.{re.escape(DOMAIN)}")
_ANSWER_WITHIN_S = 4.0
_HEADER = struct.Struct(">HHHHHH")
_TYPE_A = 1
_IS_ANSWER, _NO_ERROR, _FAILED, _NO_SUCH_NAME = 0x8580, 0, 2, 3
_LIVES_S = 1


@dataclass(frozen=True, slots=True)
class Services:
    """Reads Services and their endpoints."""

    server: str
    context: ssl.SSLContext

    def addresses(self, name: str) -> list[str] | None:
        """Those of a full name; None if there is no such name.

        Raises:
            OSError: the API server does not say.
        """
        found = _NAME.fullmatch(name)
        if not found:
            return None
        host, service, namespace = found.groups()
        spec = next((each["spec"] for each in self._list(namespace, "services", service)), None)
        if spec is None:
            return None
        if not host and spec.get("clusterIP") not in (None, "", "None"):
            return [spec["clusterIP"]]
        endpoints = self._list(namespace, "endpoints", service)
        subsets = [subset for each in endpoints for subset in each.get("subsets") or []]
        there = [address for subset in subsets for address in subset.get("addresses") or []]
        return [address["ip"] for address in there if not host or address.get("hostname") == host] or None

    def _list(self, namespace: str, kind: str, name: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"fieldSelector": f"metadata.name={name}"})
        url = f"{self.server}/api/v1/namespaces/{namespace}/{kind}?{query}"
        with urllib.request.urlopen(url, timeout=_ANSWER_WITHIN_S, context=self.context) as answer:
            items: list[dict[str, Any]] = json.load(answer)["items"]
            return items


def serve(address: str, services: Services) -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((address, PORT))
        while True:
            query, asker = listener.recvfrom(4096)
            try:
                answer = answer_to(query, services)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                print(f"names: not a query, from {asker}: {error}", file=sys.stderr, flush=True)
                continue
            listener.sendto(answer, asker)


def answer_to(query: bytes, services: Services) -> bytes:
    """
    Raises:
        struct.error, IndexError, UnicodeDecodeError: it is not a query.
    """
    identity = _HEADER.unpack_from(query)[0]
    name, end = _question(query)
    (kind,) = struct.unpack_from(">H", query, end)
    code, found = _NO_ERROR, None
    try:
        found = services.addresses(name)
    except OSError as error:
        print(f"names: {name}: {error}", file=sys.stderr, flush=True)
        code = _FAILED
    else:
        code = _NO_ERROR if found else _NO_SUCH_NAME
    # A name without an address of the kind that was asked for exists all the same.
    told = found if found and kind == _TYPE_A else []
    record = struct.Struct(">HHHIH4s")
    records = [record.pack(0xC000 + _HEADER.size, _TYPE_A, 1, _LIVES_S, 4, socket.inet_aton(each)) for each in told]
    header = _HEADER.pack(identity, _IS_ANSWER | code, 1, len(records), 0, 0)
    return header + query[_HEADER.size : end + 4] + b"".join(records)


def _question(query: bytes) -> tuple[str, int]:
    """The name that is asked for, and where in the query it ends."""
    labels, at = [], _HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    return ".".join(labels), at + 1
