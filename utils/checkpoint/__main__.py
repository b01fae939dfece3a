"""`python -m utils.checkpoint`: prints the digest of a checkpoint, or imports published weights."""

from __future__ import annotations

import sys
from pathlib import Path

from utils.checkpoint.imported import import_weights
from utils.checkpoint.reader import digest
from utils.errors import ConfigError, exit_status

USAGE = (
    "usage: python -m utils.checkpoint digest PATH    (a run folder, its checkpoints folder or a"
    " step_* folder)    or import FILE FOLDER    (weights that torch.save has written)"
)


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    return exit_status(lambda: asked(arguments), (ValueError, OSError))


def asked(arguments: list[str]) -> str:
    """Does what the command line asks for; returns what to print."""
    match arguments:
        case ["digest", path]:
            return digest(path)
        case ["import", file, folder]:
            return import_weights(Path(file), Path(folder))
    raise ConfigError(USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
