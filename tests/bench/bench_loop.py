"""What the loop costs a tiny net: a step of `experiment=tms_target`, its data included, beside the
same net in a bare loop of PyTorch, which checks, sums and measures nothing. CPU time, in turns.

python -m tests.bench.bench_loop
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from pretrain import Trainer
from tests.steps import steps_of, trainer_on
from utils.measure import hardware
from utils.ranks.distributed import Dist

ROUNDS, STEPS, FIRST = 15, 200, 2


def ours(trainer: Trainer) -> Iterator[None]:
    trainer.is_logged = lambda step: False  # type: ignore[method-assign]
    for step in steps_of(trainer, (FIRST + ROUNDS) * STEPS):
        step()
        trainer.sync.take_requests()
        yield


def bare(net: nn.Module, rows: int, features: int) -> Iterator[None]:
    keys = {"lr": 5e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "fused": True}
    optimizer = torch.optim.AdamW(net.parameters(), **keys)
    while True:
        inputs = torch.rand(rows, features) * (torch.rand(rows, features) < 0.05)
        loss = (net(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def main() -> None:
    torch.set_num_threads(1)
    hardware.tune()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_on(Dist(), Path(scratch, "run"), "experiment=tms_target")
        net = copy.deepcopy(trainer.objective.model)
        rows, features = trainer.source.length.examples_per_update, net.features
        ways = {"ours": ours(trainer), "bare loop": bare(net, rows, features)}
        turns: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(FIRST + ROUNDS):
            for name, steps in ways.items():
                before = time.process_time()
                for _ in range(STEPS):
                    next(steps)
                turns[name].append((time.process_time() - before) / STEPS)
    print("| way | µs a step | times the bare loop |\n|---|---|---|")
    medians = {name: statistics.median(seconds[FIRST:]) for name, seconds in turns.items()}
    for name, seconds in medians.items():
        print(f"| {name} | {1e6 * seconds:.0f} | {seconds / medians['bare loop']:.2f} |")


if __name__ == "__main__":
    main()
