"""Nets that no machine can hold are refused at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.making import make_objective
from utils.errors import ConfigError
from utils.spec import Spec

TEXT = Spec(vocab_size=256, seq_len=64)


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("gpt", {"num_layers": 1000, "hidden_size": 1 << 20, "num_heads": 8}),
        ("tms", {"hidden_size": 1 << 20, "identity_layers": 100}),
    ],
)
def test_absurd_sizes_are_refused_at_once(arch: str, keys: dict[str, Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"a net with [\d,]+ weights needs [\d,]+ GiB"):
        make_objective(arch, TEXT if arch == "gpt" else Spec(num_features=5), **keys)
    assert time.monotonic() - begun < 1


def test_a_net_without_numbers_may_have_any_size() -> None:
    with torch.device("meta"):
        net = make_objective("gpt", TEXT, num_layers=2, hidden_size=1 << 18, num_heads=8).model
    assert sum(p.numel() for p in net.parameters()) * 4 > 1 << 40
    matrices = [p.numel() for p in net.layers.parameters() if p.ndim == 2]
    assert net.shape.weights == sum(matrices)
