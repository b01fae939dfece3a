"""Averages of weights against ones that are computed in float64."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from optim.averages import EMA


def train(net, ema, steps):
    """Random steps; yields after each one."""
    for _ in range(steps):
        with torch.no_grad():
            for p in net.parameters():
                p += torch.randn(p.shape)
        ema.update()
        yield


def weights_of(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 0.999])
def test_an_average_follows_its_rate(rate, warms_up):
    net = nn.Linear(3, 2)
    ema = EMA(dict(net.named_parameters()), rate, warms_up)
    expected = [weights.double() for weights in weights_of(net)]
    for t, _ in enumerate(train(net, ema, 30), start=1):
        kept = min(rate, (1 + t) / (10 + t)) if warms_up else rate
        expected = [
            kept * old + (1 - kept) * new.double()
            for old, new in zip(expected, weights_of(net), strict=True)
        ]
        with ema.applied():
            averages = [weights.double() for weights in weights_of(net)]
        assert_close(averages, expected, atol=2e-6, rtol=2e-6)


def test_weights_come_back_bit_by_bit_even_after_an_exception():
    net = nn.Linear(3, 2)
    ema = EMA(dict(net.named_parameters()), 0.9)
    list(train(net, ema, 5))
    before, addresses = weights_of(net), [p.data_ptr() for p in net.parameters()]

    def evaluate():
        with ema.applied():
            assert not any(map(torch.equal, weights_of(net), before))
            raise KeyError("evaluation failed")

    with pytest.raises(KeyError):
        evaluate()
    assert all(map(torch.equal, weights_of(net), before))
    assert [p.data_ptr() for p in net.parameters()] == addresses


def test_average_of_low_precision_weights_is_kept_in_float32():
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    ema = EMA({"p": p}, 0.999)
    p.data.fill_(1)
    for _ in range(3):
        ema.update()
    assert_close(ema.state()["dense/p"], torch.full((4,), 1 - 0.999**3))
