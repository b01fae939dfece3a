"""`python -m utils.checkpoint digest PATH` prints one sha256 over all tensors of a checkpoint."""

from __future__ import annotations

import sys

from utils.checkpoint.reader import digest
from utils.errors import ConfigError, exit_status

USAGE = "usage: python -m utils.checkpoint digest PATH    (a run folder, its checkpoints folder or a step_* folder)"


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    return exit_status(lambda: asked(arguments), (ValueError, OSError))


def asked(arguments: list[str]) -> str:
    """What the command line asks for."""
    if len(arguments) != 2 or arguments[0] != "digest":
        raise ConfigError(USAGE)
    return digest(arguments[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
