"""Connections between the ranks of one host, made before anything slow is imported.

A rank that dies while it starts closes its connection, and the others need not wait for it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress

from utils.errors import ConfigError
from utils.ranks.connection import Connection, closed_in_children
from utils.ranks.launchers import Launch, master_address

RETRY_S = 0.05
LIMIT_S = 120.0  # rank 0 may be started much later, or on another host

_listener: socket.socket | None = None
_caller: _Caller | None = None


class _Caller(threading.Thread):
    """Connects to rank 0 of this host, once it listens."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name="same host", daemon=True)
        self._name, self._rank, self._lock = name, rank, threading.Lock()
        self._connection: Connection | None = None
        self._wanted = True

    def run(self) -> None:
        end = time.monotonic() + LIMIT_S
        while self._connection is None and self._wanted and time.monotonic() < end:
            with self._lock:
                self._try()
            time.sleep(RETRY_S)

    def _try(self) -> None:
        connecting = socket.socket(socket.AF_UNIX)
        try:
            connecting.connect(self._name)
        except OSError:
            connecting.close()
            return
        self._connection = Connection(connecting)
        self._connection.send({"rank": self._rank})

    def take(self) -> Connection | None:
        with self._lock:
            self._wanted = False
            return self._connection


def begin(launch: Launch) -> None:
    """Called on every rank as soon as it handles signals; a second call does nothing."""
    global _listener, _caller
    if launch.world_size == 1 or sys.platform != "linux" or _listener or _caller:
        return
    try:
        host, port = master_address(os.environ, launch, os.getppid())
    except ConfigError:
        return  # reported when the ranks meet
    name = f"\0lockstep {host}:{port}"
    if launch.rank > 0:
        _caller = _Caller(name, launch.rank)
        _caller.start()
        return
    listening = socket.socket(socket.AF_UNIX)
    with suppress(OSError):  # another run has this address, and will be in the way later
        listening.bind(name)
        listening.listen(1024)
        _listener = listening
        closed_in_children(listening)


def listener() -> list[socket.socket]:
    """On rank 0: the socket that ranks of this host have called, if there is one."""
    return [] if _listener is None else [_listener]


def connection() -> Connection | None:
    """On other ranks: the connection to rank 0, if it is on this host; none is made afterwards."""
    return None if _caller is None else _caller.take()
