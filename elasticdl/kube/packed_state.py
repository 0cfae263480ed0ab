"""What the ConfigMap of a job's state holds, packed and unpacked: the master writes it, the command line reads it.

It is all that is left of a job's course when its master is gone: memory for the next master, and, for people, the journal
and the last status. The journal is packed piece by piece, so that each piece is packed once and the oldest can be dropped.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Raised only if older readers would misunderstand what is written; they ignore what they do not know. Format 1 had the older
# part of a long journal in a ConfigMap of its own: such a journal is taken to begin later.
FORMAT = 2
HEAD = "head.json"
MEMORY = "memory.json.gz"
STATUS = "status.json.gz"
JOURNAL = "journal.jsonl.gz"
# Which master wrote it last, a pod's uid: whoever finds another one's has been replaced.
HOLDER = "elasticdl.org/holder"
PIECE_BYTES = 64_000  # of the journal's text; packed, about a tenth
ConfigMap = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """Empty text for what has not been written."""

    memory: str = ""
    status: str = ""
    journal: str = ""


def unpack_state(state: ConfigMap) -> State:
    """
    Raises:
        ValueError: it is damaged, or a later version of this package wrote it.
    """
    try:
        written = int(json.loads((state.get("data") or {}).get(HEAD, "{}")).get("format", FORMAT))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{HEAD} in the job's state is damaged: {error}") from None
    if written > FORMAT:
        raise ValueError(
            f"the job's state has format {written}, and this elasticdl knows {FORMAT}: use a later version"
        )
    return State(_unpacked(state, MEMORY), _unpacked(state, STATUS), _unpacked(state, JOURNAL))


def pack(text: str) -> str:
    return encoded([packed_piece(text.encode())])


def packed_piece(text: bytes) -> bytes:
    return gzip.compress(text, mtime=0)


def encoded(pieces: Iterable[bytes]) -> str:
    """What was packed piece by piece, as one value."""
    return base64.b64encode(b"".join(pieces)).decode()


def whole_pieces(lines: bytes) -> Iterator[bytes]:
    """All pieces of a journal that won't grow any more. What is left after them is less than one."""
    start = 0
    while len(lines) - start > PIECE_BYTES:
        end = lines.index(b"\n", start + PIECE_BYTES) + 1
        yield lines[start:end]
        start = end


def head() -> dict[str, str]:
    """What a ConfigMap's ``data`` says of the rest."""
    return {HEAD: json.dumps({"format": FORMAT})}


def _unpacked(config_map: ConfigMap, name: str) -> str:
    try:
        packed = base64.b64decode((config_map.get("binaryData") or {}).get(name, ""))
        return gzip.decompress(packed).decode(errors="replace")
    except (OSError, EOFError, zlib.error, binascii.Error) as error:
        raise ValueError(f"{name} in the job's state is damaged: {error}") from None
