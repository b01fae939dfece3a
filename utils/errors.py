"""Errors for the user: one line with the key, the value and what would be right."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

PUBLISHED_AS = {
    "reasoning_gym": "reasoning-gym",
    "sklearn": "scikit-learn",
}  # where the import has another name


class ConfigError(ValueError):
    """The user asked for something impossible; the run ends with this line and exit status 2:

        KEY=VALUE: WHAT; REMEDY

    The parts are given one by one where a caller may replace the key or the remedy; else the line
    is one text.
    """

    def __init__(self, what: str, *, key: str = "", value: object = "", remedy: str = "") -> None:
        super().__init__(what)
        self.key, self.value, self.what, self.remedy = key, value, what, remedy

    def __str__(self) -> str:
        where = f"{self.key}={self.value}" if self.key else str(self.value)
        line = f"{where}: {self.what}" if where else self.what
        return f"{line}; {self.remedy}" if self.remedy else line


class Busy(ConfigError):
    """Another run is writing where this one would write; raised on all ranks alike."""


class LocalError(ConfigError):
    """A ConfigError of this rank alone: it is printed whichever rank raises it."""


class RunError(RuntimeError):
    """All ranks agree that the run cannot go on; it ends with this line and exit status 1."""


class RankError(RuntimeError):
    """This rank cannot go on for a reason outside the program; all end with this line and exit
    status 1.
    """


class PeerError(RuntimeError):
    """Another rank failed and prints why; this one ends quietly with it."""


class Stopped(Exception):
    """The run was asked to stop, and has saved; it ends with this message and the signal's exit
    status.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


@contextmanager
def said_of(key: str) -> Iterator[None]:
    """Names the key by which the user gave a checkpoint in errors about it."""
    try:
        yield
    except ConfigError as error:
        if error.value:
            error.key = key
        raise


# wrong input, a hub that cannot be reached any more, files that cannot be read or written
USUAL = (ConfigError, RankError, OSError)


def exit_status(work: Callable[[], object], expected: tuple[type[Exception], ...] = USUAL) -> int:
    """Prints what `work` returns, if anything; the exit status is 0, or 2 after one line about
    wrong input.
    """
    try:
        if (said := work()) is not None:
            print(visible_lines(str(said)))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except expected as error:
        print(visible(_line_of(error)), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not (line := missing_package(error)):
            raise
        print(visible(line), file=sys.stderr)
        return 2
    return 0


def missing_package(error: BaseException) -> str:
    """One line for an import of a package that is not installed; empty for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top = error.name.partition(".")[0]
    if find_spec(top) is not None:
        return ""  # a part of a package that is there: a mistake in the code
    package = PUBLISHED_AS.get(top, top)
    return (
        f"the package {package} is needed: {sys.executable} -m pip install {package}, or make"
        " setup for what the recipes need"
    )


def _line_of(error: Exception) -> str:
    if not isinstance(error, OSError) or isinstance(error, ConfigError):
        return str(error)
    path = error.filename2 or error.filename
    return f"{path}: cannot be used ({brief(error)})" if path else brief(error)


def brief(thing: object) -> str:
    """An error or a value in a few words on one line."""
    text = thing.strerror if isinstance(thing, OSError) and thing.strerror else str(thing)
    # without what safetensors puts around an error of the system
    text = text.rpartition("I/O error: ")[2].partition(" (os error")[0]
    text = " ".join(text.split()) or type(thing).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"


def type_and_text(error: BaseException) -> str:
    """The type of an unexpected error, and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def full_name(thing: object) -> str:
    """The module and the name of a thing's class, as errors about users' code give it."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def kind_of(value: object) -> str:
    """A value's type with its article, and its shape if it has one."""
    if isinstance(value, dict) and not value:
        return "an empty dict"
    name, shape = type(value).__name__, getattr(value, "shape", None)
    article = "an" if name[0] in "aeiouAEIO" or name == "ndarray" else "a"
    return f"{article} {name}" + ("" if shape is None else f" of shape {[*shape]}")


def short(value: object, most: int = 60) -> str:
    """A value as an error shows it: on one line and cut to a readable length."""
    text = visible(
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return text if len(text) <= most else text[: most - 3] + "..."


def visible(text: str) -> str:
    """The text on one line, without characters that control a terminal."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def visible_lines(text: str) -> str:
    """The text on its own lines, without characters that control a terminal."""
    return "\n".join(map(visible, text.split("\n")))
