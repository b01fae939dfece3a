"""Memory is counted the same on tensors without numbers as on real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.measure import footprint

MIB = 2**20


def test_what_lives_at_one_time_is_counted_once() -> None:
    x = torch.empty(MIB, dtype=torch.uint8)

    def chain() -> None:
        y = x + 1  # 1
        z = y + 1  # 2
        del y
        z.view(2, -1).add_(1)  # neither a view nor what works in place takes more
        torch.cat([z, z, z])  # 4

    assert footprint.peak(chain, [x]) == 4 * MIB
    assert footprint.peak(lambda: x.view(-1), [x]) == 0


def test_shared_storages_are_of_one_size() -> None:
    x = torch.empty(MIB, dtype=torch.uint8)
    assert footprint.size([x, x[:10], x.view(2, -1), torch.empty(3, dtype=torch.uint8)]) == MIB + 3


def loss_of(net: nn.Module, x: Tensor) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    net(x).square().sum().backward()


@pytest.mark.parametrize("rows", [16, 64])
def test_without_numbers_as_with_them(rows: int) -> None:
    """Forward and backward of a net: the same bytes on the meta device as on the CPU, and
    activations of every layer among them.
    """
    seen = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = nn.Sequential(
                *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())),
                nn.Linear(64, 8),
            )
            x = torch.zeros(rows, 64)
        seen.append(footprint.peak(lambda net=net, x=x: loss_of(net, x), [*net.parameters(), x]))
    assert seen[0] == seen[1]
    weights = 4 * (4 * 65 * 64 + 65 * 8)
    assert seen[1] >= weights + 8 * rows * 64 * 4  # gradients, and what eight layers keep


def test_attention_keeps_no_scores() -> None:
    def attend(length: int) -> int:
        q = torch.empty(1, 2, length, 8, device="meta", requires_grad=True)
        return footprint.peak(
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward(), [q]
        )

    short, long = attend(64), attend(640)
    # scores would be a hundred times as many
    assert long == pytest.approx(10 * short, rel=0.01)
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
