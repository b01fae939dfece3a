"""`python -m utils.checkpoint digest PATH` prints one sha256 over all tensors of a checkpoint."""

from __future__ import annotations

import sys

from utils.checkpoint.reader import digest
from utils.errors import ConfigError

USAGE = "usage: python -m utils.checkpoint digest PATH    (a run folder, its checkpoints folder or a step_* folder)"


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    try:
        if len(arguments) != 2 or arguments[0] != "digest":
            raise ConfigError(USAGE)
        print(digest(arguments[1]))
        return 0
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
