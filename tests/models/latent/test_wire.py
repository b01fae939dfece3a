"""Latents arrive as they were sent, to the precision of their bytes."""

from __future__ import annotations

import pytest
import torch

from models.latent import wire

Z = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("way", "off"), [("float16", 2**-10), ("int8", 0.51 / 127), ("int4", 0.51 / 7)]
)
def test_what_arrives_is_near(way: str, off: float) -> None:
    arrived = wire.rounded(Z, way)
    assert not torch.equal(arrived, Z)
    assert ((arrived - Z).abs() <= off * Z.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(wire.rounded(torch.zeros(1, 2, 3), way), torch.zeros(1, 2, 3))


@pytest.mark.parametrize(("way", "levels"), [("int8", 255), ("int4", 15)])
def test_a_latent_has_as_many_levels_as_its_bits_tell(way: str, levels: int) -> None:
    line = torch.linspace(-1, 1, 10_001).view(1, 1, -1)
    assert len(wire.rounded(line, way).unique()) == levels


def test_bytes_are_counted_with_the_scale_of_each_latent() -> None:
    assert [wire.size(8, 6, way) for way in ("float16", "int8", "int4")] == [96, 8 * 8, 8 * 5]
    assert wire.size(1, 5, "int4") == 3 + 2


def test_prefixes_are_alike_when_their_angles_are() -> None:
    turned = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0]
    assert wire.cosine_gap(Z, 3 * Z @ turned).abs().max() < 1e-6
    assert wire.cosine_gap(Z, torch.nn.functional.pad(Z, (0, 4))).abs().max() < 1e-6, "of any width"
    assert (wire.cosine_gap(Z, Z.flip(0)) > 0.01).any()
