"""Finds where two runs differ by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from utils.checkpoint import reader
from utils.checkpoint.folders import steps_in
from utils.rundir.records import read_metrics

# by where its run computes: how far a number may be off, as a share of the largest beside it
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def beyond_rounding(one: Path, other: Path, tolerance: float) -> str:
    """Names the first metric or tensor that differs, with its step; empty if none does.

    Numbers that are small everywhere, such as a gradient that should be 0, are rounding alone.
    """
    found = [*_metrics(one, other, tolerance), *_tensors(one, other, tolerance)]
    step, _, text = min(found, default=(0, 0, ""))
    return f"First difference: step {step}: {text}." if found else ""


def _metrics(one: Path, other: Path, tolerance: float) -> Iterator[tuple[int, int, str]]:
    """Compares those of training: in an evaluation, a net that iterates amplifies rounding."""
    first, second = (read_metrics(run)["train"] for run in (one, other))
    for name in sorted(first.columns.keys() & second.columns.keys()):
        if not name.startswith("train/"):
            continue
        values = zip(first.steps.tolist(), first.column(name), second.column(name), strict=True)
        for step, a, b in values:
            if abs(a - b) > tolerance * max(1.0, abs(a)):  # NaN is a missing value
                order = int(name != "train/loss")  # of one step the loss before others
                yield step, order, f"metric {name} ({a:.10g} and {b:.10g})"


def _tensors(one: Path, other: Path, tolerance: float) -> Iterator[tuple[int, int, str]]:
    steps = (steps_in(run / "checkpoints") for run in (one, other))
    for step in sorted(set.intersection(*map(set, steps))):
        folders = (run / "checkpoints" / f"step_{step}" for run in (one, other))
        first, second = (reader.open_checkpoint(folder).tensors for folder in folders)
        for name in sorted(first):
            # weights show what an optimizer does, and sums of metrics are by micro-batch
            if name.startswith("optimizer/") or "/meter/" in name:
                continue
            a, b = (tensors[name].read().double() for tensors in (first, second))
            gap, scale = ((a - b).abs().max(), a.abs().max()) if a.numel() else (0.0, 0.0)
            if float(gap) > tolerance * max(1.0, float(scale)):
                yield step, 2, f"tensor {name} of the checkpoint"
