"""Run on every rank by test_allreduce.py: many checks of the distributed parts in one start of the
processes.

Each rank can compute what a single process would have, because all data is a function of (step,
shard).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from models.sparse_embedding import SparseEmbedding
from optim.sparse_signsgd import SparseSignSGD
from optim.sync import allreduce
from optim.sync.allreduce import AllReduce, ExactAllReduce
from optim.sync.replicas import broadcast_from_rank_0, check_same
from utils.ranks import distributed
from utils.ranks.distributed import Dist

SHARDS = 8
ALONE = Dist()
# of gradients: large ones cancel and swallow small ones on the way, so the order of adding decides
# the sign of the sum
FACTORS = torch.tensor([1e8, -1e8, 1.0, -1.0, 3.0])


class Net(nn.Module):
    """Small, with a parameter that no loss reaches unless asked for, and one in another dtype."""

    def __init__(self, reach_all: bool) -> None:
        super().__init__()
        self.reach_all = reach_all
        self.first = nn.Linear(5, 300)
        self.unused = nn.Parameter(torch.ones(7))
        self.gain = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
        self.second = nn.Linear(300, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)) * self.gain.float())
        return y * self.unused.mean() if self.reach_all else y


def shard_of(step: int, shard: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + shard)
    return torch.randn(4, 5, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def shard_loss(net: nn.Module, step: int, shard: int) -> Tensor:
    x, label = shard_of(step, shard)
    return nn.functional.cross_entropy(net(x), label, reduction="sum")


def build_net(reach_all: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(reach_all)


def reduced(
    net: nn.Module, reducer: AllReduce, dist: Dist, step: int, parts: int
) -> dict[str, Tensor]:
    """Gradients of a step whose shards this rank works through in `parts` micro-batches."""
    reducer.zero()
    owned = [list(dist.owned_shards(SHARDS))[part::parts] for part in range(parts)]
    for part in owned[:-1]:
        torch.stack([shard_loss(net, step, shard) for shard in part]).sum().backward()
    with reducer.micro_batch(last=True):
        torch.stack([shard_loss(net, step, shard) for shard in owned[-1]]).sum().backward()
    reducer.finish()
    reducer.divide(torch.tensor(4.0 * SHARDS))
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def reducer_of(net: nn.Module, dist: Dist) -> AllReduce:
    reducer = AllReduce()
    reducer.wrap(net, dist)
    return reducer


def gradients_equal_one_process(dist: Dist) -> None:
    """Any number of ranks and micro-batches gives the gradients of one process."""
    for reach_all in (False, True):
        alone, net = build_net(reach_all), build_net(reach_all)
        of_alone, reducer = reducer_of(alone, ALONE), reducer_of(net, dist)
        for step, parts in enumerate((1, 2, 1)):
            expected = reduced(alone, of_alone, ALONE, step, 1)
            got = reduced(net, reducer, dist, step, parts)
            for name, wanted in expected.items():
                near = 2e-2 if wanted.dtype == torch.bfloat16 else 1e-6
                assert_close(
                    got[name], wanted, atol=near, rtol=near, msg=lambda m, n=name: f"{n}: {m}"
                )
            assert got["first.weight"].abs().sum() > 0
            assert got["unused"].any() == reach_all, "a parameter without a gradient must be zero"
            check_same(got, dist)
        assert reducer.take_wait_s() > 0
        assert reducer.take_wait_s() == 0, "reading resets it"


def exact_gradients_have_the_bits_of_one_process(dist: Dist) -> None:
    """Also those of weights that are no whole numbers, after clipping, and in several parts."""
    bits = []
    allreduce.PART = 512
    for place in (ALONE, dist):
        net = build_net()
        reducer = ExactAllReduce(SHARDS)
        reducer.wrap(net, place)
        for step in range(2):
            reducer.zero()
            owned = place.owned_shards(SHARDS)
            for shard in owned:
                with reducer.micro_batch(last=shard == owned[-1]):
                    shard_loss(net, step, shard).backward()
            norms = reducer.finish()
            weights = [torch.tensor(0.1 * (shard + 1)) for shard in owned]
            weight = reducer.agree(0, weights, norms, [], [0.0])
            reducer.divide(weight, norms.values(), 0.5)
            bits.append([weight, *(p.grad.clone() for p in net.parameters())])
    for alone, together in zip(bits[:2], bits[2:], strict=True):
        assert alone[0] == together[0]
        assert all(torch.equal(a, b) for a, b in zip(alone[1:], together[1:], strict=True))
        assert any(grad.any() for grad in together[1:])


def uneven_participation(dist: Dist) -> None:
    """Ranks reach different parameters in different order; one has no backward at all."""
    a, b = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))
    reducer = reducer_of(nn.ParameterDict({"a": a, "b": b}), dist)
    reducer.zero()
    if dist.rank:
        with reducer.micro_batch(last=True):
            (a.sum() if dist.rank == 1 else b.sum()).backward()
    total = sum(range(dist.world_size))
    norms = reducer.finish()
    weight = reducer.agree(0, [float(dist.rank)], norms, [], [0.0])
    assert weight == total
    reducer.divide(weight)
    assert_close(a.grad, torch.full((1000,), 1.0 / total))
    assert_close(b.grad, torch.full((1000,), (dist.world_size - 2) / total))
    reducer.divide(torch.tensor(0.0))
    assert not a.grad.any(), "a step that weighs nothing"


def non_finite_is_named(dist: Dist) -> None:
    """One rank's bad gradient, row gradient or weight is known on all ranks, by parameter; also one
    step late, when other gradients lie in its place.
    """
    culprit = dist.world_size - 1
    net = build_net()
    reducer = reducer_of(net, dist)

    def ask(weight: float = 4.0, rows: Sequence[Tensor] = (), data: str = "", **bad: float) -> None:
        reducer.zero()
        shard_loss(net, 0, dist.rank).backward()
        for name, value in bad.items():
            dict(net.named_parameters())[name.replace("_", ".")].grad.view(-1)[1] = value
        requests = [1.0, float(dist.rank)]
        reducer.agree(0, [weight], reducer.finish(), [*rows], requests, lambda: data)

    def found() -> str:
        return reducer.check_finite("skip").rpartition(" in ")[2]

    mine = dist.rank == culprit
    ask()
    assert found() == ""
    assert reducer.take_requests() == [dist.world_size, sum(range(dist.world_size))]
    ask(first_bias=float("nan") if mine else 1.0)
    ask()
    assert reducer.check_finite("skip").endswith("first seen in first.bias")
    assert found() == ""
    ask(gain=float("inf") if mine else 1.0)
    assert found() == "gain"
    ask(weight=float("inf") if mine else 1.0)
    assert found() == "the loss's weight"
    rows = torch.tensor([[0.0, float("nan") if dist.rank == 0 else 1.0]])
    ask(rows=[rows, torch.zeros(0, 2)])
    assert found() == "a sparse table"
    ask(first_bias=3e38)  # finite everywhere, until it is added
    assert found() == "first.bias"
    ask(data="inputs of shard 3" if mine else "", gain=float("nan") if mine else 1.0)
    assert found() == "gain, nor is the data (inputs of shard 3)"


def clipping_is_identical(dist: Dist) -> None:
    """Clipped on the buckets as PyTorch clips a list of gradients, and bit-identical on all
    ranks.
    """
    net = build_net()
    reducer = reducer_of(net, dist)
    reducer.zero()
    shard_loss(net, 3, dist.rank).backward()
    norms = reducer.finish()
    copies = [nn.Parameter(p.detach()) for p in net.parameters()]
    for copy, p in zip(copies, net.parameters(), strict=True):
        copy.grad = p.grad.clone()
        copy.grad /= 4
    norm = nn.utils.clip_grad_norm_(copies, 0.01)
    assert_close(reducer.total_norm(norms.values()) / 4, norm)
    reducer.divide(torch.tensor(4.0), norms.values(), 0.01)
    for copy, p in zip(copies, net.parameters(), strict=True):
        assert_close(p.grad, copy.grad)
    check_same({name: p.grad for name, p in net.named_parameters()}, dist)


def replaced_gradients_are_taken(dist: Dist) -> None:
    """Code set gradients to None or to other tensors: the last values count."""
    net = build_net()
    reducer = reducer_of(net, dist)
    for _ in range(2):
        reducer.zero()
        shard_loss(net, 0, dist.rank).backward()
        net.first.weight.grad = torch.full((5, 300), float(dist.rank)).t()
        net.first.bias.grad = None
        reducer.finish()
        reducer.divide(torch.tensor(float(dist.world_size)))
        mean = (dist.world_size - 1) / 2  # of the ranks' numbers
        assert_close(net.first.weight.grad, torch.full((300, 5), mean))
        zeros = net.first.bias.grad
        assert zeros is not None
        assert not zeros.any()
        assert net.second.bias.grad.any()


def sparse_tables_become_the_same(dist: Dist) -> str:
    """Uneven row counts, duplicates across ranks, padding ids, a rank without look-ups; the whole
    table's hash at the end.
    """
    torch.manual_seed(dist.rank)  # ranks must not need the same generator state
    table = SparseEmbedding(50, 4)
    table.weights += torch.linspace(-1, 1, 200).view(50, 4)
    optimizer = SparseSignSGD({"rows": table}, SHARDS * 4, dist, lr=0.1, weight_decay=0.5)
    for step in range(6):
        looked_up = []
        for shard in dist.owned_shards(SHARDS):
            if step == 3 and shard < 4:
                continue  # the first ranks look nothing up
            generator = torch.Generator().manual_seed(100 * step + shard)
            ids = torch.randint(-1, 4, (4,), generator=generator)
            if step == 4:
                ids = torch.full((4,), -1)
            looked_up.append((ids, FACTORS[torch.randint(0, 5, (4, 4), generator=generator)]))
        for ids, factors in looked_up:
            (table(ids) * factors).sum().backward()
        optimizer.step()
    return hashlib.sha256(table.weights.numpy().tobytes()).hexdigest()


def replicas_are_made_and_compared(dist: Dist) -> None:
    torch.manual_seed(dist.rank)
    tensors = {
        "matrix": torch.randn(300, 70),
        "transposed": torch.randn(6, 8).t(),
        "odd half": torch.randn(11, dtype=torch.bfloat16)[1:],
        "flags": torch.rand(5) > 0.5,
        "scalar": torch.tensor(float(dist.rank)),
        "empty": torch.zeros(0, 3),
    }
    with pytest.raises(RuntimeError, match="matrix differs between ranks: rank 1"):
        check_same(tensors, dist)
    broadcast_from_rank_0(tensors, dist)
    everyone = dist.all_gather(tensors["transposed"])
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    assert tensors["scalar"] == 0
    if dist.rank == 1:  # only exchanged: a plain sum of the bits would not notice
        tensors["matrix"][[0, 200]] = tensors["matrix"][[200, 0]]
    with pytest.raises(RuntimeError, match="matrix differs between ranks: rank 1 from rank 0"):
        check_same(tensors, dist)
    if dist.rank == 1:
        tensors["matrix"] = torch.zeros(2)
    line = r"rank 0 has matrix \(300, 70\).*rank 1 has matrix \(2,\)"
    with pytest.raises(RuntimeError, match=line):
        broadcast_from_rank_0(tensors, dist)


def main() -> None:
    dist = distributed.start(device="cpu", timeout_s=30)
    try:
        gradients_equal_one_process(dist)
        if SHARDS % dist.world_size == 0:
            exact_gradients_have_the_bits_of_one_process(dist)
        uneven_participation(dist)
        non_finite_is_named(dist)
        clipping_is_identical(dist)
        replaced_gradients_are_taken(dist)
        replicas_are_made_and_compared(dist)
        for place in (dist, ALONE):
            print("table", sparse_tables_become_the_same(place))
    finally:
        distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
