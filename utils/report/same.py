"""Finds whether two runs are the same to the bit, and where they first differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from utils.checkpoint import tools
from utils.checkpoint.folders import steps_in
from utils.report.history import digests
from utils.rundir.records import KINDS, read_events, read_metrics


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Compares two runs: their metrics, and their checkpoints of the same steps.

    Returns `same` (None if they have no step in common), the first `step` that differs, a line of
    `text` about it, the `checkpoints` with their digests, and the first `tensors` that differ.
    """
    steps, metric = _compare_metrics(one, other)
    checkpoints = _compare_checkpoints(one, other)
    differences = [metric] if metric else []
    tensors = None
    for row in checkpoints:
        if not row["same"]:
            differences.append((row["step"], row["what"]))
            tensors = row.pop("tensors", None)
            break
    if differences:
        step = min(step for step, _ in differences)
        places = "; ".join(f"step {at:,}: {what}" for at, what in sorted(differences))
        same, text = False, f"First difference: {places}."
    elif steps or checkpoints:
        step, same = None, True
        seen = [f"{steps:,} logged steps"] if steps else []
        claim = "The same metrics; no checkpoint to compare"
        if checkpoints:
            claim = "The same to the bit"
            seen.append(f"{len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}")
        text = f"{claim}: {' and '.join(seen)} compared."
    else:
        step, same, text = None, None, "Nothing to compare: no step in common."
    found = {"same": same, "step": step, "text": text}
    return found | {"checkpoints": checkpoints, "tensors": tensors}


def _compare_metrics(one: Path, other: Path) -> tuple[int, tuple[int, str] | None]:
    """Returns how many logged steps both have before the first that differs, and that step with
    its metric. Speeds differ between runs that are the same.
    """
    tables = read_metrics(one), read_metrics(other)
    common: set[int] = set()
    differing: list[tuple[int, bool, str, str]] = []
    for kind in KINDS:
        first, second = (table[kind] for table in tables)
        both, in_first, in_second = np.intersect1d(first.steps, second.steps, return_indices=True)
        common.update(both.tolist())
        for name in first.columns.keys() & second.columns.keys():
            if not name.startswith(f"{kind}/"):
                continue
            a, b = first.columns[name][in_first], second.columns[name][in_second]
            unequal = np.flatnonzero((a != b) & ~(np.isnan(a) | np.isnan(b)))
            if len(unequal):
                at = unequal[0]
                values = f"{a[at].item()!r} and {b[at].item()!r}"
                differing.append((int(both[at]), name != "train/loss", name, values))
    if not differing:
        return len(common), None
    step, _, name, values = min(differing)  # of one step the loss before others
    return sum(other < step for other in common), (step, f"metric {name} ({values})")


def _compare_checkpoints(one: Path, other: Path) -> list[dict[str, Any]]:
    """Compares the checkpoints that both still have, and the digests that both have recorded."""
    runs = (one, other)
    first, second = (
        {row["step"]: row["digest"] for row in digests(run, read_events(run)) if row["digest"]}
        for run in runs
    )
    kept_one, kept_other = ({*steps_in(run / "checkpoints")} for run in runs)
    rows = []
    for step in sorted((kept_one & kept_other) | (first.keys() & second.keys())):
        row: dict[str, Any] = {"step": step, "digests": [first.get(step), second.get(step)]}
        if step in kept_one & kept_other:
            found = tools.compare(*(run / "checkpoints" / f"step_{step}" for run in runs))
            row |= {"same": found["same"], "tensors": found["tensors"]}
            row["what"] = f"{found['count']:,} tensors compared"
            if found["unreadable"]:
                row["what"] = f"the checkpoint: {found['unreadable']}"
            elif not found["same"]:
                of = f"{found['differing']:,} of {found['count']:,} tensors"
                row["what"] = f"tensor {found['tensors'][0]['name']} of the checkpoint, {of} differ"
        else:
            row["same"] = first[step] == second[step]
            row["what"] = "the recorded digest of the checkpoint"
        rows.append(row)
    return rows
