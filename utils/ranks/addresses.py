"""At which addresses this host listens, and which of them the ranks on other hosts reach."""

from __future__ import annotations

import socket
from contextlib import suppress

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that ranks reach by this name of this host: at loopback alone if the name
    means that, else at all addresses.
    """
    if host in LOOPBACK:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def own_address(master: str) -> str:
    """Returns this rank's address as other hosts reach it: the master's name if it is on that host,
    else the address that faces it.
    """
    places = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)
    if any(_is_own(str(place[0])) for *_, place in places):
        return master
    with socket.socket(places[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((places[0][4][0], 9))
        return str(probe.getsockname()[0])


def _is_own(address: str) -> bool:
    family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe, suppress(OSError):
        probe.bind(place)
        return True
    return False
