"""pretrain.py with steps that take their time: `python -m tests.slurm.ranks_slurm key=value …`."""

from __future__ import annotations

import sys
import time
from typing import Any

from omegaconf import DictConfig

import pretrain
from models.recursive.act import ActObjective
from utils.checkpoint import reader
from utils.command import cli
from utils.sweep import entry

PAUSE_S = 0.2  # per shard, where exact=true goes through them one by one


def main(checked: DictConfig | None) -> None:
    """As `pretrain.py` would."""
    quick = ActObjective.forward

    def slow(self: ActObjective, *arguments: Any) -> Any:
        time.sleep(PAUSE_S)
        return quick(self, *arguments)

    ActObjective.forward = slow  # type: ignore[method-assign, assignment]
    pretrain.main(checked)


if __name__ == "__main__":
    main(cli.check(sys.argv, reader.config_in, entry.sweep))
