"""Training steps of a real trainer taken one by one, without the loop around them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pretrain
from data.stream import train_loader
from tests.runs import QUIET, config_of
from utils.checkpoint.registry import Registry
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.transfer import batch_to_device


class Stepped(pretrain.Trainer):
    saved: Registry  # what its checkpoints hold


def trainer_on(dist: Dist, folder: Path, *arguments: str) -> Stepped:
    cfg = config_of(*arguments, *QUIET, f"checkpoint_path={folder}")
    run = RunDirectory(folder, dist)
    source, fingerprints = pretrain.open_source(cfg, dist, is_new=not cfg.eval_only)
    cfg = pretrain.with_plan(cfg, source, dist, run.say)
    trainer = Stepped(cfg, dist, run, source, is_new=not cfg.eval_only)
    trainer.saved = trainer.register_parts(fingerprints, {})
    trainer.objective.train()
    return trainer


def steps_of(trainer: pretrain.Trainer, number: int) -> Iterator[Callable[[], None]]:
    """Steps to be taken, one by one."""
    steps, pins = range(trainer.step, number), trainer.dist.device.type == "cuda"
    loader = train_loader(trainer.source, trainer.shard_groups, steps, 0, pins)
    for _, micro_batches in loader:
        batches = [batch_to_device(rows, trainer.dist.device) for rows in micro_batches]
        yield lambda given=batches: trainer.train_step(given, lambda: [0.0])  # type: ignore[misc]
        trainer.step += 1
