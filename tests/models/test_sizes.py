"""Sizes that no machine can hold are refused at once, by the key that is too large."""

from __future__ import annotations

import time

import pytest
import torch

from data.latent.qa import QuestionsSpec, ReaderSpec
from models.decomposition.toy import TMS, ResidMLP
from models.language.gpt import GPT
from models.latent.prefix import Prefix
from utils.errors import ConfigError
from utils.spec import Spec

TEXT, FEATURES = Spec(vocab_size=256, seq_len=64), Spec(num_features=5)
READER = ReaderSpec(vocab_size=256, seq_len=64)
GPT_KEYS = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
PREFIX_KEYS = {
    "models": [],
    "latents": 2,
    "wire": 4,
    "encoder": {"width": 16, "layers": 1, "heads": 2, "refiner": 0},
    "adapter_width": 8,
    "spread": 1,
    "deep": False,
    "gist_width": 0,
}


def prefix(**changed: object) -> Prefix:
    spec = QuestionsSpec(seq_len=32, language_models=(READER,))
    return Prefix(spec, **PREFIX_KEYS | changed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPT(TEXT, **GPT_KEYS | {"num_layers": 10**9}),
            r"arch.num_layers=1000000000: must be at most 1000",
        ),
        (
            lambda: GPT(TEXT, **GPT_KEYS | {"mlp_width": 10**9}),
            r"arch.mlp_width=1000000000: must be at most",
        ),
        (
            lambda: GPT(TEXT, num_layers=1000, hidden_size=1 << 20, num_heads=8),
            r"a net with [\d,]+ weights needs [\d,]+ GiB, and this machine has",
        ),
        (lambda: TMS(FEATURES, 2, 10**9), r"arch.identity_layers=1000000000: must be at most"),
        (
            lambda: TMS(FEATURES, 1 << 20, 100),
            r"a net with [\d,]+ weights needs [\d,]+ GiB",
        ),
        (
            lambda: ResidMLP(FEATURES, 8, 10**9, 10**9),
            r"arch.mlp_width=1000000000: must be at most",
        ),
        (
            lambda: prefix(encoder={"width": 16, "layers": 10**9, "heads": 2, "refiner": 0}),
            r"arch.encoder.layers=1000000000: must be at most 1000",
        ),
        (lambda: prefix(spread=10**9), r"arch.spread=1000000000: must be at most 1024"),
    ],
)
def test_absurd_sizes_are_refused_at_once(make: object, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=message):
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
