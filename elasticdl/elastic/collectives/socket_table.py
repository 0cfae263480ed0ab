"""The TCP sockets of this machine, as the kernel lists them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = ((socket.AF_INET, Path("/proc/self/net/tcp")), (socket.AF_INET6, Path("/proc/self/net/tcp6")))


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One row. Its ends are in the form of `sockaddr`."""

    local: bytes
    remote: bytes  # all zeros but the family if there is no peer (yet)
    user: int
    inode: int

    @property
    def ends(self) -> tuple[bytes, ...]:
        """Those that are some socket's address."""
        return (self.local, self.remote) if any(self.remote[2:]) else (self.local,)


def tcp_sockets() -> Iterator[TcpSocket]:
    """All that are neither closed nor about to be, those that listen or are connecting included."""
    for family, table in TABLES:
        if table.exists():  # there may be no IPv6
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, *fields = line.split()
                yield TcpSocket(_parse(family, local), _parse(family, remote), int(fields[4]), int(fields[6]))


def sockaddr(family: int, host: bytes, port: int) -> bytes:
    """The beginning of the C structure of this name, as far as it holds family, port and address."""
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + flow + host


def _parse(family: int, entry: str) -> bytes:
    """From the table's form: words of this machine's byte order, and the port, in hexadecimal digits."""
    words, _, port = entry.partition(":")
    host = b"".join(struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    return sockaddr(family, host, int(port, 16))
