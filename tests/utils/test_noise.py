"""Noise is a pure function of (seed, step, shard, stream)."""

import pytest
import torch

from contract import Noise
from utils.ranks.distributed import Dist

DRAWS = [
    lambda noise, slots: noise.uniform("a", (slots, 3)),
    lambda noise, slots: noise.normal("a", (slots, 3)),
    lambda noise, slots: noise.truncated_normal("a", (slots, 3)),
    lambda noise, slots: noise.integers("a", (slots, 3), 2, 17),
]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_every_layout_of_shards_draws_the_same(draw, world_size: int) -> None:
    whole = draw(Noise(7, 11, range(8)), 32)
    parts = [Dist(rank, world_size).owned_shards(8) for rank in range(world_size)]
    assert torch.equal(
        torch.cat([draw(Noise(7, 11, part), 4 * len(part)) for part in parts]), whole
    )
    assert torch.equal(torch.cat([draw(Noise(7, 11, [shard]), 4) for shard in range(8)]), whole)


@pytest.mark.parametrize("draw", DRAWS)
def test_no_history_and_no_global_state(draw) -> None:
    torch.manual_seed(1)
    first = draw(Noise(7, 11, range(8)), 32)
    noise = Noise(7, 11, range(8))
    noise.uniform("b", (8,))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(draw(noise, 32), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_are_these() -> None:
    """A change of the generator would change every curve; then this test must be changed
    knowingly.
    """
    bits = (Noise(0, 1, [0, 5]).uniform("explore", (4,)) * 2**24).int().tolist()
    assert bits == [2455751, 14527291, 8014994, 16608118]


def test_seeds_steps_shards_and_streams_differ() -> None:
    size = 20_000
    draws = [
        Noise(0, 0, [0]).uniform("a", (size,)),
        Noise(1, 0, [0]).uniform("a", (size,)),
        Noise(0, 1, [0]).uniform("a", (size,)),
        Noise(0, 0, [1]).uniform("a", (size,)),
        Noise(0, 0, [0]).uniform("b", (size,)),
    ]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 5 / size**0.5
    for index, draw in enumerate(draws):  # nor is one a stretch of another
        for other in draws[:index]:
            assert len(set(draw[:500].tolist()) & set(other.tolist())) < 50


def test_distributions() -> None:
    size = 400_000
    noise = Noise(3, 5, range(8))
    uniform = noise.uniform("a", (size,))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts = torch.histc(uniform, 64, 0, 1)
    # chi-squared with 63 degrees: mean 63, six deviations
    assert ((counts - size / 64) ** 2 / (size / 64)).sum() < 120
    assert torch.corrcoef(torch.stack([uniform[1:], uniform[:-1]]))[0, 1].abs() < 5 / size**0.5
    normal = noise.normal("a", (size,)).double()
    assert normal.isfinite().all()
    moments = [
        normal.mean().item(),
        normal.var().item(),
        (normal**3).mean().item(),
        (normal**4).mean().item(),
    ]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.06)
    cut = noise.truncated_normal("a", (size,)).double()
    assert [cut.mean().item(), cut.std().item()] == pytest.approx([0, 1], abs=0.01)
    assert cut.abs().max() == pytest.approx(2 / 0.8796, abs=0.01), "two sigma of what was cut"
    whole = noise.integers("a", (size,), 2, 17)
    assert whole.dtype == torch.int64
    counts = torch.bincount(whole, minlength=17)[2:]
    assert len(counts) == 15
    assert ((counts - size / 15) ** 2 / (size / 15)).sum() < 50


def test_some_slots_alone_draw_what_all_would() -> None:
    noise, rows = Noise(7, 11, [2, 5, 6]), torch.tensor([11, 0, 4, 7])
    assert torch.equal(noise.uniform("a", (12, 3, 2), rows), noise.uniform("a", (12, 3, 2))[rows])
