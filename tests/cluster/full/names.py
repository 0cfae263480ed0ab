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

_NAME = re.compile(rf"([\w-]+)\.([\w-]+)\.svc\.{re.escape(DOMAIN)}")
_HEADER, _RECORD = struct.Struct(">HHHHHH"), struct.Struct(">HHHIH4s")
_TYPE_A = 1
_IS_ANSWER, _FAILED, _NO_SUCH_NAME = 0x8580, 2, 3
_LIVES_S = 1


def serve(address: str, api: Api) -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((address, 53))
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
    found: list[str] = []
    code = _NO_SUCH_NAME
    if service := _NAME.fullmatch(".".join(labels)):
        try:
            found = api.addresses(*service.groups())
        except ApiError as error:
            code = _NO_SUCH_NAME if error.status == ABSENT else _FAILED
    # A name without an address of the kind that was asked for exists all the same.
    told = found if kind == _TYPE_A else []
    records = [_RECORD.pack(0xC000 + _HEADER.size, _TYPE_A, 1, _LIVES_S, 4, socket.inet_aton(each)) for each in told]
    flags = _IS_ANSWER | (0 if found else code)
    header = _HEADER.pack(_HEADER.unpack_from(query)[0], flags, 1, len(records), 0, 0)
    return header + query[_HEADER.size : at + 5] + b"".join(records)
