"""Finds whether two runs are the same to the bit, and where they first differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from utils.checkpoint import tools
from utils.report.reading import checkpoint_steps, digests
from utils.rundir.records import KINDS, read_events, read_metrics


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Compares two runs: their metrics, and their checkpoints of the same steps.

    Returns whether they are the same (None if they have no step in common), the first step that
    differs, a line that says so, the checkpoints with their digests, and the first tensors that
    differ.
    """
    steps, metric = _compare_metrics(one, other)
    checkpoints = _compare_checkpoints(one, other)
    differences = [metric] if metric else []
    tensors = None
    for each in checkpoints:
        if not each["same"]:
            differences.append((each["step"], each["what"]))
            tensors = each.pop("tensors", None)
            break
    if differences:
        step = min(step for step, _ in differences)
        places = "; ".join(f"step {at:,}: {what}" for at, what in sorted(differences))
        same, text = False, f"First difference: {places}."
    elif steps or checkpoints:
        step, same = None, True
        seen = [f"{steps:,} logged steps"] if steps else []
        seen += [f"{len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}"] * bool(checkpoints)
        bits = (
            "The same to the bit" if checkpoints else "The same metrics; no checkpoint to compare"
        )
        text = f"{bits}: {' and '.join(seen)} compared."
    else:
        step, same, text = None, None, "Nothing to compare: no step in common."
    told = {"same": same, "step": step, "text": text}
    return told | {"checkpoints": checkpoints, "tensors": tensors}


def _compare_metrics(one: Path, other: Path) -> tuple[int, tuple[int, str] | None]:
    """Returns how many logged steps both have before the first that differs, and that step with
    its metric. Speeds differ between runs that are the same.
    """
    tables = read_metrics(one), read_metrics(other)
    common: set[int] = set()
    differing: list[tuple[int, bool, str, str]] = []
    for kind in KINDS:
        mine, theirs = (table[kind] for table in tables)
        both, here, there = np.intersect1d(mine.steps, theirs.steps, return_indices=True)
        common.update(both.tolist())
        for name in mine.columns.keys() & theirs.columns.keys():
            if not name.startswith(f"{kind}/"):
                continue
            a, b = mine.columns[name][here], theirs.columns[name][there]
            unequal = np.flatnonzero((a != b) & ~(np.isnan(a) | np.isnan(b)))
            if len(unequal):
                at = unequal[0]
                values = f"{a[at].item()!r} and {b[at].item()!r}"
                differing.append((int(both[at]), name != "train/loss", name, values))
    if not differing:
        return len(common), None
    step, _, name, values = min(differing)
    return sum(each < step for each in common), (step, f"metric {name} ({values})")


def _compare_checkpoints(one: Path, other: Path) -> list[dict[str, Any]]:
    """Compares the checkpoints that both still have, and the digests that both have recorded."""
    mine, theirs = (
        {each["step"]: each["digest"] for each in digests(run, read_events(run)) if each["digest"]}
        for run in (one, other)
    )
    both = checkpoint_steps(one) & checkpoint_steps(other)
    rows = []
    for step in sorted(both | (mine.keys() & theirs.keys())):
        row: dict[str, Any] = {"step": step, "digests": [mine.get(step), theirs.get(step)]}
        if step in both:
            found = tools.compare(*(run / "checkpoints" / f"step_{step}" for run in (one, other)))
            row |= {"same": found["same"], "tensors": found["tensors"]}
            row["what"] = f"{found['count']:,} tensors compared"
            if found["unreadable"]:
                row["what"] = f"the checkpoint: {found['unreadable']}"
            elif not found["same"]:
                of = f"{found['differing']:,} of {found['count']:,} tensors"
                row["what"] = f"tensor {found['tensors'][0]['name']} of the checkpoint, {of} differ"
        else:
            row |= {
                "same": mine[step] == theirs[step],
                "what": "the recorded digest of the checkpoint",
            }
        rows.append(row)
    return rows
