"""Run on every rank by test_everywhere.py: goes on from what other ranks have saved in other ways,
and saves that again.
"""

import sys
from pathlib import Path

from tests.runs import TINY_TRM
from tests.steps import steps_of, trainer_on
from utils.checkpoint import reader, resume
from utils.checkpoint.resume import Start
from utils.checkpoint.writer import Writer
from utils.ranks import distributed

WAYS = {"allreduce": [], "ddp": ["sync=ddp"], "fsdp": ["sync=fsdp"]}


def main(data: str, folder: Path, before: str, *ways: str) -> None:
    """`before`: how many ranks saved what these go on from; none, and they train."""
    dist = distributed.start(device="cpu", timeout_s=60)
    own = [argument for argument in TINY_TRM if not argument.startswith("data.embedded")]
    for number, way in enumerate(ways):
        place = folder / f"{way}-{dist.world_size}"
        trainer = trainer_on(dist, place, *own, f"data_path={data}", "max_steps=9", *WAYS[way])
        if before == "none":
            for take in steps_of(trainer, 3):
                take()
            trainer.sync.check_finite("raise", newest=True)
        else:  # another way each time
            other = ways[(number + 1) % len(ways)]
            checkpoint = folder / f"{other}-{before}" / "checkpoints" / "step_3"
            start = Start(checkpoint, meta=reader.read_meta(checkpoint))
            resume.restore(start, trainer.saved, trainer.cfg, print, 9, trainer.lr_after)
            trainer.step = start.step
        one = Writer(place / "checkpoints", dist, print)
        one.save(trainer.step, *trainer.saved.snapshot(trainer.progress()))
        assert one.wait() == ""
        one.close()
    dist.sums([1.0])
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
