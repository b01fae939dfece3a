"""Backward and gradient reduction on 2 gloo ranks: our buckets, one blocking call per parameter, and DDP.

    python -m tests.bench.bench_allreduce

The three run in turns inside one process group, so that whatever else the machine does hits all alike. Each is timed
from clearing the gradients until the reduced ones are there; ours includes its finiteness check and the division.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from operator import truediv

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from optim.allreduce import Reducer
from tests.ranks import run_ranks, succeeded
from utils import distributed
from utils.distributed import Dist

RANKS = 2
ROUNDS = int(os.environ.get("ROUNDS", "15"))
BUCKET_MB = float(os.environ.get("BUCKET_MB", "16"))


class Block(nn.Module):
    """The matrices of one reasoning layer: attention (or token mixing) and SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv_proj(x).chunk(3, dim=-1))
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return nn.functional.rms_norm(x + self.down_proj(nn.functional.silu(gate) * up), x.shape[-1:])


def reasoner(levels: int, layers: int, width: int = 512, inner: int = 1536, vocabulary: int = 11) -> nn.Module:
    """Parameters of the published sizes; every level's layers are run once per step."""
    blocks = [Block(width, inner) for _ in range(levels * layers)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary, bias=False))


def many_small() -> nn.Module:
    """300 tensors, so that the cost per call shows."""
    return nn.Sequential(nn.Embedding(11, 32), *(nn.Linear(32, 32) for _ in range(149)), nn.Linear(32, 11, bias=False))


def nets() -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    """Name -> (how to build the net, this rank's tokens)."""
    tokens = torch.randint(0, 11, (2, 81))
    return {
        "TRM-like": (lambda: reasoner(levels=1, layers=2), tokens),
        "HRM-like": (lambda: reasoner(levels=2, layers=4), tokens),
        "300 small tensors": (many_small, tokens),
    }


def ours(net: nn.Module, dist: Dist) -> Callable[[Tensor], float]:
    reducer = Reducer(dict(net.named_parameters()), dist, bucket_mb=BUCKET_MB)

    def step(tokens: Tensor) -> float:
        loss = net(tokens).square().sum()
        start = _aligned(dist)
        reducer.zero()
        with reducer.sending():
            loss.backward()
        reducer.finish(1.0)
        return time.perf_counter() - start

    return step


def per_parameter(net: nn.Module, dist: Dist) -> Callable[[Tensor], float]:
    def step(tokens: Tensor) -> float:
        loss = net(tokens).square().sum()
        start = _aligned(dist)
        net.zero_grad()
        loss.backward()
        for p in net.parameters():
            c10d.all_reduce(p.grad)
            p.grad /= dist.world_size
        return time.perf_counter() - start

    return step


def ddp(net: nn.Module, dist: Dist) -> Callable[[Tensor], float]:
    wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)

    def step(tokens: Tensor) -> float:
        loss = wrapped(tokens).square().sum()
        start = _aligned(dist)
        net.zero_grad()
        loss.backward()
        return time.perf_counter() - start

    return step


def _aligned(dist: Dist) -> float:
    dist.barrier()
    return time.perf_counter()


def measure(dist: Dist, build: Callable[[], nn.Module], tokens: Tensor) -> dict[str, list[float]]:
    """Milliseconds of each way, round by round, the slowest rank counting in every round."""
    ways = {"ours": ours, "per parameter": per_parameter, "DDP": ddp}
    steps = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        steps[name] = way(build(), dist)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 3):
        for name, step in steps.items():
            slowest = torch.tensor(step(tokens))
            c10d.all_reduce(slowest, c10d.ReduceOp.MAX)
            if round_ >= 3:  # DDP lays out its buckets anew after its first step
                times[name].append(slowest.item() * 1000)
    return times


def one_rank() -> None:
    torch.manual_seed(0)
    dist = distributed.start(device="cpu")
    try:
        if dist.is_main:
            print(f"milliseconds, median (best) of {ROUNDS} rounds; ratios of the medians (of the bests), above 1: ours is faster")
            print(f"{'net':20}{'parameters':>11}{'ours':>16}{'per parameter':>16}{'DDP':>16}{'per param./ours':>16}{'DDP/ours':>16}")
        for name, (build, tokens) in nets().items():
            size = sum(p.numel() for p in build().parameters())
            times = measure(dist, build, tokens)
            one, many, torchs = ((statistics.median(ms), min(ms)) for ms in times.values())
            ratios = [tuple(map(truediv, other, one)) for other in (many, torchs)]
            if dist.is_main:
                columns = [f"{median:.1f} ({best:.1f})" for median, best in (one, many, torchs)]
                columns += [f"{median:.2f} ({best:.2f})" for median, best in ratios]
                print(f"{name:20}{size / 1e6:>10.1f}M" + "".join(f"{text:>16}" for text in columns), flush=True)
    finally:
        distributed.stop()


def main() -> None:
    if "RANK" in os.environ:
        one_rank()
    else:
        print(succeeded(run_ranks(RANKS, ["-m", "tests.bench.bench_allreduce"], timeout=600))[0].stdout, end="")


if __name__ == "__main__":
    main()
