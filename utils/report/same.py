"""Finds whether two runs are the same to the bit, and where they first differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.checkpoint import tools
from utils.report.evaluations import STEP
from utils.report.reading import digests, read_events
from utils.report.rows import Row, read_rows

LEARNED = ("train/", "eval/")  # times and speeds differ between runs that are the same


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Compares two runs: their metrics, and their checkpoints of the same steps."""
    metrics = _compare_rows(_by_step(one), _by_step(other))
    checkpoints = [
        {
            "step": step,
            **tools.compare(*(run / "checkpoints" / f"step_{step}" for run in (one, other))),
        }
        for step in sorted(_steps(one) & _steps(other))
    ]
    recorded = _compare_digests(one, other)
    first = next((each for each in checkpoints if not each["same"]), None)
    return {
        "metrics": metrics,
        "checkpoints": checkpoints,
        "recorded": recorded,
        "first": first,
        "verdict": _verdict(metrics, checkpoints, recorded),
    }


def _verdict(
    metrics: Mapping[str, Any], checkpoints: Sequence[Row], recorded: Sequence[Row]
) -> dict[str, Any]:
    """Returns whether all that can be compared is the same, and a line that says so."""
    differences = []
    broken = next((each for each in checkpoints if not each["same"]), None)
    digest = next((each for each in recorded if not each["same"]), None)
    if metrics["differs"]:
        at = metrics["differs"]
        values = f"{at['values'][0]!r} and {at['values'][1]!r}"
        differences.append((at["step"], f"metric {at['name']} ({values})"))
    if broken and broken["unreadable"]:
        differences.append((broken["step"], f"the checkpoint: {broken['unreadable']}"))
    elif broken:
        tensor = broken["tensors"][0]["name"]
        differences.append((broken["step"], f"tensor {tensor} of the checkpoint"))
    if digest and (not broken or digest["step"] < broken["step"]):
        differences.append((digest["step"], "the recorded digest of the checkpoint"))
    if differences:
        step = min(step for step, _ in differences)
        places = "; ".join(f"step {at:,}: {what}" for at, what in sorted(differences))
        return {"same": False, "step": step, "text": f"First difference: {places}."}
    seen = [f"{metrics['steps']:,} logged steps"] if metrics["steps"] else []
    compared = {each["step"] for each in (*checkpoints, *recorded)}
    if compared:
        seen.append(f"{len(compared)} checkpoint{'s' * (len(compared) > 1)}")
    if not seen:
        return {"same": None, "step": None, "text": "Nothing to compare: no step in common."}
    bits = "The same to the bit" if compared else "The same metrics; no checkpoint to compare"
    return {"same": True, "step": None, "text": f"{bits}: {' and '.join(seen)} compared."}


def _by_step(directory: Path) -> dict[int, dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_rows(directory / "metrics.jsonl"):
        learned = {name: row[name] for name in row if name.startswith(LEARNED)}
        by_step.setdefault(row["step"], {}).update(learned)
    return by_step


def _compare_rows(one: Mapping[int, Row], other: Mapping[int, Row]) -> dict[str, Any]:
    """Returns the first step with a metric that differs, among the steps that both have logged."""
    common = sorted(one.keys() & other.keys())
    for step in common:
        names = sorted(one[step].keys() & other[step].keys())
        for name in sorted(names, key=lambda name: (name != "train/loss", name)):
            values = [one[step][name], other[step][name]]
            if values[0] != values[1]:
                same = sum(each < step for each in common)
                return {"steps": same, "differs": {"step": step, "name": name, "values": values}}
    return {"steps": len(common), "differs": None}


def _steps(directory: Path) -> set[int]:
    try:
        names = [each.name for each in (directory / "checkpoints").iterdir()]
    except OSError:
        return set()
    return {int(named[1]) for name in names if (named := STEP.fullmatch(name))}


def _compare_digests(one: Path, other: Path) -> list[dict[str, Any]]:
    """Compares the digests that both have recorded, also those of deleted checkpoints."""
    mine, theirs = (
        {each["step"]: each["digest"] for each in digests(read_events(run)) if each["digest"]}
        for run in (one, other)
    )
    return [
        {"step": step, "same": mine[step] == theirs[step], "digests": [mine[step], theirs[step]]}
        for step in sorted(mine.keys() & theirs.keys())
    ]
