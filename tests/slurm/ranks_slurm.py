"""pretrain.py with steps that take their time: `python -m tests.slurm.ranks_slurm key=value …`."""

from __future__ import annotations

import time
from typing import Any

import pretrain
from models.recursive.act import ActObjective
from utils.command import cli

PAUSE_S = 0.2  # per shard, where exact=true goes through them one by one


def main() -> None:
    """As `pretrain.py` would."""
    quick = ActObjective.forward

    def slow(self: ActObjective, *arguments: Any) -> Any:
        time.sleep(PAUSE_S)
        return quick(self, *arguments)

    ActObjective.forward = slow  # type: ignore[method-assign, assignment]
    cli.main(pretrain.app)


if __name__ == "__main__":
    main()
