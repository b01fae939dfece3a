"""`python -m utils.checkpoint`: looks into checkpoints, compares, verifies, exports and imports."""

from __future__ import annotations

import sys
from pathlib import Path

from utils.checkpoint import tools
from utils.checkpoint.reader import digest
from utils.errors import ConfigError, exit_status

USAGE = (
    "usage: python -m utils.checkpoint digest|show|verify PATH    (a run folder, its checkpoints"
    " folder or a step_* folder)    or diff PATH PATH    or export PATH FOLDER    (its weights, or"
    " their averages, as model.safetensors)    or import [--raw] FILE FOLDER    (weights that"
    " torch.save has written, or their averages where the file has both; --raw: the weights)"
)


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status: 1 if `diff` finds a difference."""
    differs = False

    def work() -> str:
        nonlocal differs
        answer = answer_to(arguments)
        differs = arguments[0] == "diff" and not answer.startswith(tools.SAME)
        return answer

    return exit_status(work, (ValueError, OSError)) or int(differs)


def answer_to(arguments: list[str]) -> str:
    """Does what the command line asks for; returns what to print."""
    match arguments:
        case ["digest", path]:
            return digest(path)
        case ["show", path]:
            return tools.show(path)
        case ["verify", path]:
            return tools.verify(path)
        case ["diff", one, other]:
            return tools.diff(one, other)
        case ["export", path, folder]:
            return tools.export(path, Path(folder))
        case ["import", *options, file, folder] if options in ([], ["--raw"]):
            return tools.import_weights(Path(file), Path(folder), raw=bool(options))
    raise ConfigError(USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
