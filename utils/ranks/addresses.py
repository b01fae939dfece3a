"""Which address of this host the ranks on other hosts reach."""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def place() -> str:
    """Processes that share it share a loopback address."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def reachable(master: str, places: Sequence[str], views: Sequence[str]) -> tuple[str, str]:
    """Where the others reach rank 0's host, and where to listen for them there: at that address alone, if the host has it.

    Args:
        master: the name by which they found it.
        places: where each rank is, rank 0 first.
        views: the address that each rank takes the name for. Here it may stand for a loopback address.
    """
    if all(place == places[0] for place in places):
        return "127.0.0.1", "127.0.0.1"
    for address in dict.fromkeys(view for place, view in zip(places, views, strict=True) if place != places[0]):
        if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback and _is_own(address):
            return address, address
    return master, ""  # they reach it through a translated one


def address_of(host: str) -> str:
    """What a name stands for here; nothing where it is unknown."""
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe, suppress(OSError):
        probe.bind(place)
        return True
    return False


def own_address(master: str) -> str:
    """Where the others reach this host: as they reach the master, if that is here; else by the address that faces it."""
    places = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)
    if any(_is_own(str(place[0])) for *_, place in places):
        return master
    with socket.socket(places[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((places[0][4][0], 9))
        return str(probe.getsockname()[0])
