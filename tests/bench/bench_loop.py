"""Measures the loop's overhead for a language model: our step against the shortest PyTorch loop
over the same net, optimizer and data, in turns.

python -m tests.bench.bench_loop
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import pretrain
from data.stream import to_tensors
from tests.steps import steps_of, trainer_on
from utils.measure import hardware
from utils.ranks.distributed import Dist

ROUNDS, STEPS = 12, 5
ARGUMENTS = [
    "experiment=lm",
    "optim=adamw_matrices",
    "lr=1e-3",
    "arch.forward_dtype=float32",
    "arch.loss.chunk_tokens=null",
]


def bare_steps(trainer: pretrain.Trainer) -> Iterator[Callable[[], None]]:
    """As tutorials have it: a mean, backward, clip, step. The data's tensors are made in the loop,
    as ours are.
    """
    net, source = copy.deepcopy(trainer.objective.model), trainer.source
    groups = [
        [p for p in net.parameters() if p.ndim > 1],
        [p for p in net.parameters() if p.ndim <= 1],
    ]
    decays = zip(groups, (0.1, 0.0), strict=True)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )

    def step(number: int) -> None:
        batch = to_tensors(
            [source.train_batch(number, shard) for shard in range(trainer.cfg.shards)]
        )
        logits = net.logits(net(batch["inputs"]))
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(10**9):
        yield lambda number=number: step(number)  # type: ignore[misc]


def timed(steps: Iterator[Callable[[], None]]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        next(steps)()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    hardware.tune()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_on(Dist(), Path(scratch) / "run", *ARGUMENTS, "grad_clip=1.0")
        ours, bare = steps_of(trainer, 10**6), bare_steps(trainer)
        timed(ours), timed(bare)
        rounds = [(timed(ours), timed(bare)) for _ in range(ROUNDS)]
    tokens = trainer.source.length.examples_per_update * trainer.source.spec.seq_len
    print(
        "One thread, float32, medians of rounds in turn\n| loop | ms per step | tokens/s"
        " |\n|---|---|---|"
    )
    for name, column in zip(("ours", "bare"), zip(*rounds, strict=True), strict=True):
        print(
            f"| {name} | {statistics.median(column) * 1e3:.1f} |"
            f" {tokens / statistics.median(column):,.0f} |"
        )
    print(
        f"ours/bare, median of {ROUNDS} rounds:"
        f" {statistics.median(one / other for one, other in rounds):.3f}"
    )


if __name__ == "__main__":
    main()
