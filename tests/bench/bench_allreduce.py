"""Gradient reduction on 2 gloo ranks: our buffer and DDP.

    python -m tests.bench.bench_allreduce

Both run in turns inside one process group, so that other load on the machine affects both alike.
Each is timed from clearing the gradients until the reduced ones are there and their norms known,
which say whether they are finite: by the clock (the slowest rank's time) and in CPU time (that of
all ranks), which says more on a loaded machine.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from contract import Noise
from data.recursive.puzzles import PuzzleSpec
from optim.sync.allreduce import AllReduce
from tests.making import make_objective
from tests.ranks import check_ended_well, run_ranks
from utils.ranks import distributed
from utils.ranks.distributed import Dist

RANKS = 2
ROUNDS = int(os.environ.get("ROUNDS", "25"))
Step = Callable[[Tensor], tuple[float, float]]  # the seconds of a rank by each of CLOCKS
CLOCKS = {"clock": c10d.ReduceOp.MAX, "CPU": c10d.ReduceOp.SUM}


class Reasoner(nn.Module):
    """A recursive net with the published parameters and one cycle per step, so that computing hides
    less of the reduction.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        spec = PuzzleSpec(vocab_size=11, seq_len=81, table_rows=1)
        cycles = {"H_cycles": 1, "L_cycles": 1}
        self.net = make_objective(kind, spec, forward_dtype="float32", **cycles).model

    def forward(self, tokens: Tensor) -> Tensor:
        start = self.net.fresh_state(Noise(0, 0, range(1)), *tokens.shape)
        _, logits, halting = self.net(start, tokens, None)
        return torch.cat((logits.flatten(), halting.flatten() + 1))


def many_small() -> nn.Module:
    """300 tensors, so that the cost per call shows."""
    return nn.Sequential(
        nn.Embedding(11, 32),
        *(nn.Linear(32, 32) for _ in range(149)),
        nn.Linear(32, 11, bias=False),
    )


def nets() -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    """Name -> (how to build the net, this rank's tokens)."""
    tokens = torch.randint(0, 11, (1, 81))
    return {
        "TRM": (lambda: Reasoner("trm"), tokens),
        "HRM": (lambda: Reasoner("hrm"), tokens),
        "300 small tensors": (many_small, tokens),
    }


class Clocks:
    """Counts from the moment at which all ranks are there."""

    def __init__(self, dist: Dist) -> None:
        dist.sums([1.0])
        self.start = time.perf_counter(), time.process_time()

    def passed(self) -> tuple[float, float]:
        """Returns the seconds since then by the clock, and those of all threads' CPU time."""
        clock, cpu = self.start
        return time.perf_counter() - clock, time.process_time() - cpu


def ours(net: nn.Module, dist: Dist) -> Step:
    reducer = AllReduce()
    reducer.wrap(net, dist)
    one = torch.ones(1)

    def step(tokens: Tensor) -> tuple[float, float]:
        loss = net(tokens).square().sum()
        start = Clocks(dist)
        reducer.zero()
        with reducer.micro_batch(last=True):
            loss.backward()
        reducer.divide(one, reducer.finish().values())
        return start.passed()

    return step


def ddp(net: nn.Module, dist: Dist) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(
        net, gradient_as_bucket_view=True, broadcast_buffers=False
    )

    def step(tokens: Tensor) -> tuple[float, float]:
        loss = wrapped(tokens).square().sum()
        start = Clocks(dist)
        net.zero_grad()
        loss.backward()
        nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        return start.passed()

    return step


WAYS: dict[str, Callable] = {"ours": ours, "DDP": ddp}


def measure(
    dist: Dist, build: Callable[[], nn.Module], tokens: Tensor
) -> dict[str, dict[str, list[float]]]:
    """Returns milliseconds by clock and way, round by round."""
    steps: dict[str, Step] = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        steps[name] = way(build(), dist)
    times: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in WAYS} for clock in CLOCKS
    }
    for round_ in range(ROUNDS + 3):
        for name, step in steps.items():
            for (clock, over_ranks), seconds in zip(CLOCKS.items(), step(tokens), strict=True):
                of_ranks = torch.tensor(seconds)
                c10d.all_reduce(of_ranks, over_ranks)
                if round_ >= 3:  # DDP lays out its buckets anew after its first step
                    times[clock][name].append(of_ranks.item() * 1000)
    return times


def one_rank() -> None:
    torch.manual_seed(0)
    dist = distributed.start(device="cpu")
    try:
        if dist.is_main:
            print(
                "| net | weights | by | ours, ms | DDP, ms | DDP/ours |\n|---|---|---|---|---|---|"
            )
        for name, (build, tokens) in nets().items():
            size = sum(p.numel() for p in build().parameters())
            for clock, times in measure(dist, build, tokens).items():
                mine, theirs = (statistics.median(times[way]) for way in WAYS)
                if dist.is_main:
                    cells = f"{mine:.1f} | {theirs:.1f} | {theirs / mine:.2f}"
                    print(f"| {name} | {size / 1e6:.1f}M | {clock} | {cells} |", flush=True)
    finally:
        distributed.stop()


def main() -> None:
    if "RANK" in os.environ:
        one_rank()
    else:
        done = run_ranks(RANKS, ["-m", "tests.bench.bench_allreduce"], timeout=600)
        print(check_ended_well(done)[0].stdout, end="")


if __name__ == "__main__":
    main()
