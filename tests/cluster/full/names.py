"""A small cluster DNS: the names of Services, asked of the API server whenever somebody asks for one.

Serves A records over UDP. Every other name does not exist: nothing leads out of the cluster.
"""

from __future__ import annotations

import re
import socket
import struct
import sys

from elasticdl.kube.client import ABSENT, ApiError
from tests.cluster.api import Api
from tests.cluster.full.configuration import DOMAIN

PORT = 53
_NAME = re.compile(rf"([\w-]+)\.([\w-]+)\.svc\.{re.escape(DOMAIN)}")
_HEADER, _RECORD = struct.Struct(">HHHHHH"), struct.Struct(">HHHIH4s")
_TYPE_A = 1
_IS_ANSWER, _NO_ERROR, _FAILED, _NO_SUCH_NAME = 0x8580, 0, 2, 3
_LIVES_S = 1


def serve(address: str, api: Api) -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((address, PORT))
        while True:
            query, asker = listener.recvfrom(4096)
            try:
                listener.sendto(answer_to(query, api), asker)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                print(f"names: not a query, from {asker}: {error}", file=sys.stderr, flush=True)


def answer_to(query: bytes, api: Api) -> bytes:
    """
    Raises:
        struct.error, IndexError, UnicodeDecodeError: it is not a query.
    """
    labels, at = [], _HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    (kind,) = struct.unpack_from(">H", query, at + 1)
    code, found = _addresses(".".join(labels), api)
    # A name without an address of the kind that was asked for exists all the same.
    told = found if kind == _TYPE_A else []
    records = [_RECORD.pack(0xC000 + _HEADER.size, _TYPE_A, 1, _LIVES_S, 4, socket.inet_aton(each)) for each in told]
    header = _HEADER.pack(_HEADER.unpack_from(query)[0], _IS_ANSWER | code, 1, len(records), 0, 0)
    return header + query[_HEADER.size : at + 5] + b"".join(records)


def _addresses(name: str, api: Api) -> tuple[int, list[str]]:
    """What becomes of a question, and the answer."""
    service = _NAME.fullmatch(name)
    if not service:
        return _NO_SUCH_NAME, []
    try:
        found = api.addresses(*service.groups())
    except ApiError as error:
        if error.status != ABSENT:
            print(f"names: {name}: {error}", file=sys.stderr, flush=True)
            return _FAILED, []
        found = []
    return _NO_ERROR if found else _NO_SUCH_NAME, found
