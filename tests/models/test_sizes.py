"""Nets that no machine can hold are refused at once."""

from __future__ import annotations

import time

import pytest
import torch

from models.decomposition.toy import TMS
from models.language.gpt import GPT
from utils.errors import ConfigError
from utils.spec import Spec

TEXT, FEATURES = Spec(vocab_size=256, seq_len=64), Spec(num_features=5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(TEXT, num_layers=1000, hidden_size=1 << 20, num_heads=8),
        lambda: TMS(FEATURES, 1 << 20, 100),
    ],
)
def test_absurd_sizes_are_refused_at_once(make: object) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"a net with [\d,]+ weights needs [\d,]+ GiB"):
        make()  # type: ignore[operator]
    assert time.monotonic() - begun < 1


def test_a_net_without_numbers_may_have_any_size() -> None:
    with torch.device("meta"):
        net = GPT(TEXT, num_layers=2, hidden_size=1 << 18, num_heads=8)
    assert sum(p.numel() for p in net.parameters()) * 4 > 1 << 40


def test_weights_are_counted_as_they_are() -> None:
    net = GPT(TEXT, num_layers=3, hidden_size=24, num_heads=4, kv_heads=2, mlp_width=40)
    matrices = [p.numel() for p in net.layers.parameters() if p.ndim == 2]
    assert net.shape.weights == sum(matrices)
