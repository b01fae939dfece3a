"""What must be done before the slow imports: whoever starts the program may close its streams, or press Ctrl-C at once."""

from __future__ import annotations

import os
import sys

from utils.errors import ConfigError
from utils.ranks import signals
from utils.ranks.launchers import detect


def begin() -> None:
    """From here on a signal ends the program with one line."""
    open_standard_streams()
    try:
        rank = detect(os.environ).rank
    except ConfigError:
        rank = 0  # what is wrong is said later
    signals.install(rank)


def open_standard_streams() -> None:
    """A closed descriptor 0, 1 or 2 goes to the next file that is opened, and what anybody prints would land in that file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 (open to the end)
