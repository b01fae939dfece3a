"""The sparse optimizer against a dense one; for several ranks see sync/ranks_allreduce.py."""

import pytest
import torch
from torch.testing import assert_close

from models.sparse_embedding import SparseEmbedding
from optim.sparse_signsgd import SparseSignSGD
from utils.ranks.distributed import Dist

LR, DECAY = 0.05, 0.3


def make(rows=30, width=4, capacity=100, **kwargs):
    torch.manual_seed(0)
    table = SparseEmbedding(rows, width)
    table.weights.normal_()
    return table, SparseSignSGD(
        {"table": table}, capacity, Dist(), lr=LR, weight_decay=DECAY, **kwargs
    )


def dense_step(weights, looked_up):
    """Whole-table arithmetic: scatter all gradients, then decay and step the rows that were looked
    up.
    """
    total, touched = torch.zeros_like(weights), torch.zeros(len(weights), dtype=torch.bool)
    for ids, grads in looked_up:
        total.index_add_(0, ids[ids >= 0].long(), grads[ids >= 0])
        touched[ids[ids >= 0].long()] = True
    return torch.where(touched[:, None], weights * (1 - LR * DECAY) - LR * total.sign(), weights)


def test_equals_dense_sign_sgd_with_duplicates_micro_batches_and_padding():
    table, optimizer = make()
    expected = table.weights.clone()
    for step in range(5):
        looked_up = []
        for _ in range(1 + step % 3):
            ids = torch.randint(-1, 8, (9,), dtype=torch.int32)
            # a looked-up row without gradient still decays
            factors = torch.randn(9, 4) * (torch.rand(9, 1) > 0.3)
            (table(ids) * factors).sum().backward()
            looked_up.append((ids, factors))
        expected = dense_step(expected, looked_up)
        optimizer.step()
        assert_close(table.weights, expected, atol=1e-7, rtol=0)
    assert torch.equal(table.weights[8:], make()[0].weights[8:]), (
        "rows that nobody looked up must not move"
    )


def test_no_active_row_and_no_look_up_change_nothing():
    table, optimizer = make()
    before = table.weights.clone()
    optimizer.step()
    table(torch.full((5,), -1)).sum().backward()
    optimizer.step()
    assert torch.equal(table.weights, before)
    assert table.take_row_grads() == [], "the look-ups of the step are used up"


def test_local_grads_show_the_step_and_zero_grad_forgets_it():
    table, optimizer = make()
    before = table.weights.clone()
    (table(torch.tensor([1, 2])) * float("nan")).sum().backward()
    (table(torch.tensor([3])) * 2).sum().backward()
    assert [grad.isfinite().all().item() for grad in optimizer.local_grads()] == [False, True]
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(table.weights, before)


def test_more_rows_than_capacity_is_an_error():
    table, optimizer = make(capacity=3)
    table(torch.arange(3)).sum().backward()
    optimizer.step()
    table(torch.arange(2)).sum().backward()
    table(torch.arange(2)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"4 rows of table were looked up in one step, .* room for 3"
    ):
        optimizer.step()
