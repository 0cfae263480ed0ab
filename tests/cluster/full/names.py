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
_HEADER, _RECORD = struct.Struct(">HHHHHH"), struct.Struct(">HHHIH4s")
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
        for each in self._list(namespace, "services", service):
            if not host and each["spec"].get("clusterIP") not in (None, "", "None"):
                return [each["spec"]["clusterIP"]]
        subsets = [
            subset for each in self._list(namespace, "endpoints", service) for subset in each.get("subsets") or []
        ]
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
                listener.sendto(answer_to(query, services), asker)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                print(f"names: not a query, from {asker}: {error}", file=sys.stderr, flush=True)


def answer_to(query: bytes, services: Services) -> bytes:
    """
    Raises:
        struct.error, IndexError, UnicodeDecodeError: it is not a query.
    """
    labels, at = [], _HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    (kind,) = struct.unpack_from(">H", query, at + 1)
    try:
        found = services.addresses(".".join(labels))
        code = _NO_ERROR if found else _NO_SUCH_NAME
    except OSError as error:
        print(f"names: {labels}: {error}", file=sys.stderr, flush=True)
        found, code = None, _FAILED
    # A name without an address of the kind that was asked for exists all the same.
    told = found if found and kind == _TYPE_A else []
    records = [_RECORD.pack(0xC000 + _HEADER.size, _TYPE_A, 1, _LIVES_S, 4, socket.inet_aton(each)) for each in told]
    header = _HEADER.pack(_HEADER.unpack_from(query)[0], _IS_ANSWER | code, 1, len(records), 0, 0)
    return header + query[_HEADER.size : at + 5] + b"".join(records)
