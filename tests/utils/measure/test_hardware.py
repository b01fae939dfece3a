"""Facts of the machine."""

import json
from importlib import metadata

import pytest
import torch

from utils.measure.hardware import describe, known_fault, peak_of, use_of_devices
from utils.ranks.distributed import Dist

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 PCIe", BF16, 756e12),
        ("Tesla V100-SXM2-16GB", BF16, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", BF16, None),
    ],
)
def test_peaks_by_name(name: str, dtype: torch.dtype, peak: float | None) -> None:
    assert peak_of(name, dtype) == peak


@pytest.mark.parametrize("world_size", [1, 2, 20])
def test_memory_of_every_rank_is_in_the_row(world_size: int) -> None:
    """Each rank's memory if there are few ranks, and always the maximum."""

    class Ranks(Dist):
        def all_gather_text(self, text: str) -> list[str]:
            return [
                text,
                *(json.dumps({"peak_bytes": 2**50 + rank}) for rank in range(1, world_size)),
            ]

    row = use_of_devices(Ranks(0, world_size), torch.float32, 1e9)
    assert 50e6 < row.pop("memory/peak_bytes") < 500e9
    if world_size > 1:
        assert row.pop("memory/most_peak_bytes") == 2**50 + world_size - 1
        assert row.pop("memory/rank_1/peak_bytes") == 2**50 + 1
        assert len(row) == min(16, world_size) - 1
    else:
        assert not row


def test_the_log_says_why_a_gpu_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    dist = Dist(device=torch.device("cuda", 0))
    for has_bfloat16, end in ((False, "float32, as this GPU has no bfloat16"), (True, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda fast=has_bfloat16, **_: fast)
        assert describe(dist, torch.float32).endswith(end)


@pytest.mark.parametrize(
    ("capability", "version", "is_known"),
    [((10, 0), "13.1.0.3", True), ((12, 0), "13.2.1", False), ((9, 0), "12.9.1", False)],
)
def test_a_library_that_corrupts_data_is_named(
    capability: tuple[int, int], version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(metadata, "version", lambda package: version)
    said = known_fault(torch.device("cuda", 0))
    assert said.startswith(f"cuBLAS {version} on a Blackwell GPU") == is_known == bool(said)
