"""Errors that speak to the user: one line with the key, the value and what would be right."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Something the user asked for cannot be; the run ends with this one line and exit status 2."""


class Busy(ConfigError):
    """Another run is at work where this one would write; on all ranks alike."""


class LocalError(ConfigError):
    """The same, true of this rank alone: it must speak, whichever rank it is."""


class RunError(RuntimeError):
    """All ranks agree that the run cannot go on; it ends with this one line and exit status 1."""


class RankError(RuntimeError):
    """This rank alone cannot go on, for a reason outside the program: it says so in one line, and all end with exit status 1."""


class PeerError(RuntimeError):
    """Another rank failed and says why itself; this one ends quietly with it."""


class Stopped(Exception):
    """The run was asked to stop, and has saved; it ends with this message and the signal's exit status."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def said_of(key: str) -> Iterator[None]:
    """What is wrong with a checkpoint is said of the key by which the user gave it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("checkpoint=", f"{key}=", 1)) from None


def exit_status(work: Callable[[], object], expected: tuple[type[Exception], ...] = (ConfigError,)) -> int:
    """Of a command that prints what it returns: 0, or 2 and one line about what is wrong with what it was given."""
    try:
        print(work())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except expected as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def brief(thing: object) -> str:
    """What an error says, or a value is, in a few words of one line."""
    text = thing.strerror if isinstance(thing, OSError) and thing.strerror else str(thing)
    text = text.rpartition("I/O error: ")[2].partition(" (os error")[0]  # as safetensors words what the system said
    text = " ".join(text.split()) or type(thing).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"


def short(value: object) -> str:
    """A value as an error shows it: on one line, and not all of it."""
    if isinstance(value, int) and abs(value) >= 2**256:
        value = hex(value)  # there is no limit to what can be written so
    text = visible("null" if value is None else str(value).lower() if isinstance(value, bool) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def visible(text: str) -> str:
    """The same on one line, with nothing in it that a terminal obeys."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
