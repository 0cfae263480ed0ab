"""Which network interface an address of this machine belongs to."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from elasticdl.common.errors import UserError

# From Linux's sockios.h; an interface's name fills 16 bytes of the request, its address follows 4 bytes later.
_GET_ADDRESS, _GET_MASK = 0x8915, 0x891B
_REQUEST = struct.Struct("16s16x")
_ADDRESS = slice(20, 24)
_IPV6_TABLE = Path("/proc/net/if_inet6")

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


def interface_of(address: str) -> str:
    """The interface that has this address or, failing that, the network that it is in.

    Raises:
        UserError: there is none, or it is no address.
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        raise UserError(f"{address!r} is no IP address of this machine") from None
    networks = {**_ipv4_interfaces(), **_ipv6_interfaces()}
    found = [name for network, name in networks.items() if network.ip == wanted]
    found += [name for network, name in networks.items() if wanted in network.network]
    if found:
        return found[0]
    raise UserError(f"no network interface of this machine has the address {address}")


def _ipv4_interfaces() -> dict[Interface, str]:
    found: dict[Interface, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_ask(handle, request, name) for request in (_GET_ADDRESS, _GET_MASK))
            except OSError:  # it has none
                continue
            found[ipaddress.IPv4Interface(f"{address}/{mask}")] = name
    return found


def _ask(handle: socket.socket, request: int, name: str) -> str:
    answer = fcntl.ioctl(handle, request, _REQUEST.pack(name.encode()))
    return socket.inet_ntoa(answer[_ADDRESS])


def _ipv6_interfaces() -> dict[Interface, str]:
    try:
        lines = _IPV6_TABLE.read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return {}
    found: dict[Interface, str] = {}
    for line in lines:
        digits, _, prefix, _, _, name = line.split()
        found[ipaddress.IPv6Interface((int(digits, 16), int(prefix, 16)))] = name
    return found
