"""The lazy average of tables against one that averages every row after every step."""

import pytest
import torch
from torch import nn

from models.sparse_embedding import SparseEmbedding
from optim.sparse_signsgd import SparseSignSGD
from utils.averages import EMA
from utils.ranks.distributed import Dist

RATE = 0.9


def make(rate=RATE, warms_up=False):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    table = SparseEmbedding(40, 3)
    table.weights.normal_()
    optimizer = SparseSignSGD({"table": table}, 16, Dist(), lr=0.1, weight_decay=0.1)
    ema = EMA(dict(net.named_parameters()), {"table": table}, rate, warms_up)
    optimizer.before_update.append(ema.before_rows_change)
    return net, table, optimizer, ema


def train(net, table, optimizer, ema, steps, seed=1):
    """Random steps; yields after each one."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(-1, 20, (6,), generator=generator)
        (table(ids) * torch.randn(6, 3, generator=generator)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                p += torch.randn(p.shape, generator=generator)
        ema.update()
        yield


def everything(net, table):
    return [p.detach().clone() for p in net.parameters()] + [table.weights.clone()]


@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 0.999])
def test_equals_an_average_of_everything_after_every_step(rate, warms_up):
    net, table, optimizer, ema = make(rate, warms_up)
    eager = [value.double() for value in everything(net, table)]
    for step, _ in enumerate(train(net, table, optimizer, ema, 30)):
        t = step + 1
        kept = min(rate, (1 + t) / (10 + t)) if warms_up else rate
        eager = [
            kept * old + (1 - kept) * new.double()
            for old, new in zip(eager, everything(net, table), strict=True)
        ]
        if step in (3, 17, 18, 29):
            with ema.applied():
                for got, expected in zip(everything(net, table), eager, strict=True):
                    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


def test_tables_may_be_left_out():
    net, table, optimizer, ema = make()
    without = EMA(dict(net.named_parameters()), {}, RATE)
    optimizer.before_update.append(without.before_rows_change)
    for _ in train(net, table, optimizer, ema, 5):
        without.update()
    with ema.applied():
        averaged = everything(net, table)
    now = table.weights.clone()
    with without.applied():
        *dense, rows = everything(net, table)
    assert torch.equal(rows, now)
    assert not torch.equal(rows, averaged[-1])
    assert all(torch.equal(a, b) for a, b in zip(dense, averaged, strict=False))


def test_weights_come_back_bit_by_bit_even_after_an_exception():
    net, table, optimizer, ema = make()
    list(train(net, table, optimizer, ema, 5))
    before = everything(net, table)
    addresses = [p.data_ptr() for p in [*net.parameters(), table.weights]]

    def evaluate():
        with ema.applied():
            assert all(
                not torch.equal(a, b) for a, b in zip(everything(net, table), before, strict=True)
            )
            raise KeyError("evaluation failed")

    with pytest.raises(KeyError):
        evaluate()
    assert all(torch.equal(a, b) for a, b in zip(everything(net, table), before, strict=True))
    assert [p.data_ptr() for p in [*net.parameters(), table.weights]] == addresses


def test_average_of_low_precision_weights_is_kept_in_float32():
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    ema = EMA({"p": p}, {}, 0.999)
    p.data.fill_(1)
    for _ in range(3):
        ema.update()
    torch.testing.assert_close(ema.state()["dense/p"], torch.full((4,), 1 - 0.999**3))
