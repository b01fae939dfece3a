"""The machine: peak speed, memory, the cost of a call."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata

import torch

from utils.ranks.distributed import Dist

SHOWN_RANKS = 16  # by themselves, in every row of metrics
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

# NVIDIA's data sheets: dense bfloat16 (float16 where the chip has no bfloat16) operations per
# second. First match counts.
PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"B100", 1750e12),
    (r"H[18]00 PCIe", 756e12),
    (r"H100 NVL", 835e12),
    (r"H200|H[18]00", 989e12),
    (r"\bH20\b", 148e12),
    (r"A100|A800", 312e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"RTX 6000 Ada", 364e12),
    (r"RTX A6000", 154.8e12),
    (r"RTX 5090", 209.5e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090 Ti", 80e12),
    (r"RTX 3090", 71e12),
    (r"V100", 125e12),
    (r"\bT4\b", 65e12),
)
WITHOUT_BFLOAT16 = re.compile(r"V100|\bT4\b")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak of a device in operations per second; None where unknown, as on a CPU."""
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Dense peak of a GPU by its name. float32 means TF32, which `tune` turns on: half of
    bfloat16.
    """
    # a slice of a GPU, of which the name says how much memory it has, not how fast it is
    if "MIG" in name:
        return None
    peak = next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
    if peak is None or dtype == torch.float16:
        return peak
    if WITHOUT_BFLOAT16.search(name):
        return None
    return {torch.bfloat16: peak, torch.float32: peak / 2}.get(dtype)


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: by PyTorch on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def use_of_devices(dist: Dist, dtype: torch.dtype, flops: float) -> dict[str, float]:
    """The use of devices as a row of metrics: rank 0's, and with several ranks each one's or the
    highest.

    `flops`: operations per second of all ranks together, 0 if unknown.
    """
    held = {"peak_bytes": peak_memory(dist.device)}
    if dist.device.type == "cuda":
        held |= {
            "allocated_bytes": torch.cuda.memory_allocated(dist.device),
            "reserved_bytes": torch.cuda.memory_reserved(dist.device),
        }
    peak, row = (
        peak_flops(dist.device, dtype),
        {f"memory/{name}": float(count) for name, count in held.items()},
    )
    every = [json.loads(text) for text in dist.all_gather_text(json.dumps(held))]
    if dist.world_size > 1:
        row |= {f"memory/most_{name}": max(one[name] for one in every) for name in held}
        row |= {
            f"memory/rank_{rank}/{name}": count
            for rank, one in enumerate(every[:SHOWN_RANKS])
            for name, count in one.items()
        }
    return row | ({"speed/mfu": flops / dist.world_size / peak} if flops and peak else {})


def forward_dtype(device: torch.device) -> str:
    """Resolves `arch.forward_dtype=auto`: bfloat16 if the machine has instructions for it, else
    float32.
    """
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        fast = False  # older systems cannot
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if fast else "float32"


def count_flops(call: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention in one call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def describe(dist: Dist, dtype: torch.dtype) -> str:
    """One line for the log: where and with what this run computes."""
    device, why = f"CPU with {torch.get_num_threads()} of {os.cpu_count()} threads", ""
    if dist.device.type == "cuda":
        device = torch.cuda.get_device_name(dist.device)
        if dtype == torch.float32 and forward_dtype(dist.device) == "float32":
            why = ", as this GPU has no bfloat16"
    elif dist.device.type == "mps":
        device = "Apple GPU (not tried)"
    ranks = f"{dist.world_size} rank{'s' if dist.world_size > 1 else ''}"
    started = "" if dist.launcher == "none" else f" by {dist.launcher}"
    return (
        f"{ranks}{started} on {socket.gethostname()}: {device}, PyTorch {torch.__version__},"
        f" {str(dtype).removeprefix('torch.')}{why}"
    )


def known_fault(device: torch.device) -> str:
    """Returns a line about a library that is known to compute wrongly on this device, or nothing.

    NVIDIA says that many kernels of cuBLAS before 13.2 free Blackwell's tensor memory twice.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0):
        return ""
    for package in ("nvidia-cublas", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            if tuple(map(int, version.split(".")[:2])) < (13, 2):
                return (
                    f"cuBLAS {version} on a Blackwell GPU: before 13.2, data may be corrupted"
                    " without an error while other kernels run, such as NCCL's; use a newer one"
                )
    return ""


def tune(exact: bool = False, float64: bool = False) -> None:
    """Allows TF32 for float32 products on GPUs that have it, and keeps freed memory. For an
    `exact` run, an operation without a deterministic kernel is an error; with `float64`, nets are
    made in it.
    """
    torch.set_default_dtype(torch.float64 if float64 else torch.float32)
    torch.set_float32_matmul_precision("high")
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(exact)  # off again for a later run of this process
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        # by default every large tensor is mapped, page-faulted in and unmapped again at each use
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
