"""One end of a connection between a rank's watch and the failure server: lines of JSON."""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

LONGEST = 1 << 17  # bytes of a message

Message = dict[str, Any]
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Connection:
    """Sends and receives messages; one longer than `longest` bytes ends the connection."""

    def __init__(self, connected: socket.socket, longest: int = LONGEST) -> None:
        connected.settimeout(2.0)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        closed_in_children(connected)
        self.socket = connected
        self.longest = longest
        self._received = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Best effort: that the other side is gone is noticed elsewhere."""
        with suppress(OSError), self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None at the end of the connection."""
        try:
            chunk = self.socket.recv(LONGEST)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        if max(map(len, (*lines, self._received))) > self.longest or not (chunk or lines):
            return None
        return list(_messages(lines))

    def finish(self) -> None:
        """Send no more; what was sent still arrives."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


def closed_in_children(opened: socket.socket) -> None:
    """Close it in forked children, which would keep it open after their parent's death."""
    _open.add(opened)


def _messages(lines: Sequence[bytes]) -> Iterator[Message]:
    for line in lines:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            # a line of 60,000 brackets is deeper than the parser goes
            message = None
        yield message if isinstance(message, dict) else {}


def _close_all() -> None:
    for opened in list(_open):
        opened.close()


os.register_at_fork(after_in_child=_close_all)
