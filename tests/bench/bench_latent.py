"""Steps of latent prefixes on two ranks beside the shortest DistributedDataParallel loop over the
same nets, in turns.

python -m tests.bench.bench_latent MODEL MODEL (folders of runs of experiment=latent_reader)

CPU time is that of rank 0. It tells more than the clock on a machine that does other work, too.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pretrain
from data.stream import to_tensors
from models.objective import Context
from optim.groups import build_dense
from tests.ranks import check_ended_well, run_ranks
from tests.steps import steps_of, trainer_on
from utils.measure import hardware
from utils.noise import Noise
from utils.ranks import distributed
from utils.ranks.distributed import Dist

ROUNDS, STEPS = 12, 4


class Mean(nn.Module):
    """As tutorials have it: each rank's mean, which DistributedDataParallel averages."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: dict[str, Tensor], context: Context) -> Tensor:
        out = self.objective(batch, None, context)
        return out.loss / out.weight


def bare_steps(trainer: pretrain.Trainer, dist: Dist) -> Iterator[Callable[[], None]]:
    net = Mean(copy.deepcopy(trainer.objective))
    wrapped = DistributedDataParallel(net, find_unused_parameters=False)
    trained = {
        name: parameter
        for name, parameter in net.objective.named_parameters()
        if parameter.requires_grad
    }
    optimizers = build_dense(trainer.cfg.optim.dense, trained)
    shards = dist.owned_shards(trainer.cfg.shards)

    def step(number: int) -> None:
        batch = to_tensors([trainer.source.train_batch(number, shard) for shard in shards])
        wrapped(batch, Context(0.5, Noise(0, number, shards))).backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(10**9):
        yield lambda number=number: step(number)  # type: ignore[misc]


class Cost(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float


def timed(steps: Iterator[Callable[[], None]], dist: Dist) -> Cost:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        next(steps)()
    dist.barrier()
    return Cost((time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS)


def rank(folder: str, models: list[str]) -> None:
    dist = distributed.start()
    torch.set_num_threads(1)
    hardware.tune()
    trainer = trainer_on(
        dist,
        Path(folder) / "run",
        "experiment=latent",
        f"arch.models=[{','.join(models)}]",
        "arch.loss.alone=0",
        f"arch.forward_dtype={hardware.forward_dtype(dist.device)}",
    )
    ways = {"bare": bare_steps(trainer, dist), "ours": steps_of(trainer, 10**9)}
    for steps in ways.values():
        timed(steps, dist)
    rounds = [{name: timed(steps, dist) for name, steps in ways.items()} for _ in range(ROUNDS)]
    if dist.is_main:
        for clock in Cost._fields:
            costs = {name: [getattr(each[name], clock) for each in rounds] for name in ways}
            medians = {name: 1e3 * statistics.median(some) for name, some in costs.items()}
            ratio = statistics.median(map(truediv, costs["bare"], costs["ours"]))
            print(
                f"{clock}: DDP {medians['bare']:.0f} ms, ours {medians['ours']:.0f} ms a step;"
                f" {ratio:.3f} of its speed"
            )
    distributed.stop()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--rank":
        rank(sys.argv[2], sys.argv[3:])
        return
    if len(sys.argv) != 3:
        print("skipped: give the folders of two runs of experiment=latent_reader")
        return
    with tempfile.TemporaryDirectory() as scratch:
        ranks = run_ranks(
            2, ["-m", "tests.bench.bench_latent", "--rank", scratch, *sys.argv[1:]], timeout=550
        )
        print(check_ended_well(ranks)[0].stdout, end="")


if __name__ == "__main__":
    main()
