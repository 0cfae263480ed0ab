"""What the two ConfigMaps of a job's state hold, packed and unpacked: the master writes them, the command line reads them.

They are all that is left of a job's course when its master is gone: memory for the next master, and, for people, the
journal and the last status. `NAME-state` is small and written often; it has the newest part of the journal. `NAME-journal`
has the rest, and is written only when that part has grown. Each part of the journal has a number: the newest part says which
one it follows. If `NAME-journal` has a later number than that, it was written after `NAME-state`, of what was there.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.job.journal import thinned

# Raised only if older readers would misunderstand what is written; they ignore what they do not know.
FORMAT = 1
HEAD = "head.json"  # format, and number of the part of the journal
MEMORY = "memory.json.gz"
STATUS = "status.json.gz"
JOURNAL = "journal.jsonl.gz"
# Which master wrote it last, a pod's uid: whoever finds another one's has been replaced.
HOLDER = "elasticdl.org/holder"
# From such a size on, packed, entries on steps are joined, so many to one: they push nothing out.
LONG_BYTES = 150_000
BUNCHES = (8, 64)
_GZIP = 16 + zlib.MAX_WBITS
ConfigMap = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    """Empty text for what has not been written. ``number``: of the journal's older part, which has so many bytes."""

    memory: str = ""
    status: str = ""
    journal: str = ""
    number: int = 0
    older_bytes: int = 0


def unpack_state(state: ConfigMap, older: ConfigMap | None = None) -> State:
    """``older``: the ConfigMap of the journal, read after the other one.

    Raises:
        ValueError: it is damaged, or a later version of this package wrote it.
    """
    (follows, newest), (number, journal) = _part(state), _part(older or {})
    size = len(journal.encode())
    if number <= follows:
        journal += newest
    return State(_unpacked(state, MEMORY), _unpacked(state, STATUS), journal, number, size)


def pack(text: str) -> str:
    compressor = zlib.compressobj(wbits=_GZIP)
    return base64.b64encode(compressor.compress(text.encode()) + compressor.flush()).decode()


def pack_journal(text: str, most: int) -> str:
    """The journal in so many bytes: if it is long its steps are joined, and if it is too long its oldest lines go."""
    packed = pack(text)
    for times, bunch in enumerate(BUNCHES, 1):
        if len(packed) > times * LONG_BYTES:
            text = "".join(thinned(text.splitlines(keepends=True), bunch))
            packed = pack(text)
    while len(packed) > most and text:
        _, _, text = text[len(text) // 2 :].partition("\n")
        packed = pack(text)
    return packed


def head(number: int) -> dict[str, str]:
    """What a ConfigMap's ``data`` says of the rest."""
    return {HEAD: json.dumps({"format": FORMAT, "number": number})}


def _part(config_map: ConfigMap) -> tuple[int, str]:
    try:
        found = json.loads((config_map.get("data") or {}).get(HEAD, "{}"))
        written, number = int(found.get("format", FORMAT)), int(found.get("number", 0))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{HEAD} in the job's state is damaged: {error}") from None
    if written > FORMAT:
        raise ValueError(
            f"the job's state has format {written}, and this elasticdl knows {FORMAT}: use a later version"
        )
    return number, _unpacked(config_map, JOURNAL)


def _unpacked(config_map: ConfigMap, name: str) -> str:
    packed = (config_map.get("binaryData") or {}).get(name, "")
    try:
        return zlib.decompress(base64.b64decode(packed), _GZIP).decode() if packed else ""
    except (zlib.error, binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{name} in the job's state is damaged: {error}") from None
