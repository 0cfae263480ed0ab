"""Which network interface an address of this machine belongs to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from elasticdl.common.errors import UserError

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
    interfaces = list(_interfaces())
    found = [name for name, each in interfaces if each.ip == wanted]
    found += [name for name, each in interfaces if wanted in each.network]
    if found:
        return found[0]
    raise UserError(f"no network interface of this machine has the address {address}")


def _interfaces() -> Iterator[tuple[str, Interface]]:
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.netmask:
                bits = int(ipaddress.ip_address(each.netmask)).bit_count()
                yield name, ipaddress.ip_interface(f"{each.address.partition('%')[0]}/{bits}")
