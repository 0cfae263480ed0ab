"""What a job's state ConfigMap holds, packed and unpacked: the master writes it, the command line reads it.

It is all that is left of a job's course when its master is gone: memory for the next master, and, for people, the
journal and the last status.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MEMORY = "memory.json"
STATUS = "status.json"
JOURNAL = "journal.jsonl.gz"
# Which master wrote it last, a pod's uid: whoever finds another one's has been replaced.
HOLDER = "elasticdl.org/holder"
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class State:
    """Empty text for what has not been written."""

    memory: str = ""
    status: str = ""
    journal: str = ""


def unpack_state(config_map: Mapping[str, Any]) -> State:
    """
    Raises:
        ValueError: the journal is damaged.
    """
    data = config_map.get("data") or {}
    packed = (config_map.get("binaryData") or {}).get(JOURNAL, "")
    try:
        journal = zlib.decompress(base64.b64decode(packed), _GZIP).decode() if packed else ""
    except (zlib.error, binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(f"the journal in the job's state is damaged: {error}") from None
    return State(data.get(MEMORY, ""), data.get(STATUS, ""), journal)


class Packer:
    """Text that grows, compressed as it comes: what has come before is not gone through again."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._done = bytearray()

    def add(self, text: str) -> None:
        self._done += self._compressor.compress(text.encode())

    def packed(self) -> str:
        """All of it so far, as it stands in the ConfigMap."""
        return base64.b64encode(bytes(self._done) + self._compressor.copy().flush()).decode()
