"""Finds whether two runs are the same to the bit, and where they first differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from utils.checkpoint import tools
from utils.checkpoint.folders import steps_in
from utils.report.history import digests
from utils.rundir.records import KINDS, ROW, finite, read_events, read_lines


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
    """Returns how many logged steps both have, and the first that differs, with its metric."""
    first, second = _metrics_by_step(one), _metrics_by_step(other)
    common = sorted(first.keys() & second.keys())
    for step in common:
        here, there = first[step], second[step]
        names = [name for name in here.keys() & there.keys() if here[name] != there[name]]
        if names:
            name = min(names, key=lambda name: (name != "train/loss", name))
            values = f"{json.dumps(here[name])} and {json.dumps(there[name])}"
            return len(common), (step, f"metric {name} ({values})")
    return len(common), None


def _metrics_by_step(run: Path) -> dict[int, dict[str, float | None]]:
    """Returns the metrics that a run has logged, None where one is not finite; without speeds,
    which differ between runs that are the same.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for row in read_lines(run / "metrics.jsonl", ROW):
        metrics = {name: finite(row[name]) for name in row if name.split("/")[0] in KINDS}
        steps.setdefault(row["step"], {}).update(metrics)
    return steps


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
