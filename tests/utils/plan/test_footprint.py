"""Memory is counted by storage, while it lives. tests/test_memory_plan.py compares nets with and
without numbers.
"""

import pytest
import torch
import torch.nn.functional as F

from utils.plan import footprint

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
