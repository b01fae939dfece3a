"""Runs that differ in their seed alone are shown as one, with the mean and the spread of its
curves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from utils.report.reading import Payload, flatten
from utils.rundir.records import KINDS, read_config
from utils.sweep.seeds import Setting, difference
from utils.sweep.table import is_sweep, read_sweep, result, runs_of

# they differ between runs of one setting
OF_ONE_RUN = ("seed", "run_name", "checkpoint_path", "resume", "device", "compile", "wandb")
MOST_KEYS = 3  # in the name of a setting

Groups = list[tuple[str, list[Path]]]  # names, empty for those of runs, and directories


def by_setting(directories: Sequence[Path]) -> Groups:
    """Groups runs, and those of sweeps, that differ in their seed alone; if all do or none has
    several seeds, each run is by itself.
    """
    runs = []
    for directory in directories:
        if is_sweep(directory):
            runs += [run for _, group in runs_of(directory, read_sweep(directory)) for run in group]
        else:
            runs.append(directory)
    groups: dict[str, dict[str, Path]] = {}  # by seed: one that is given twice counts once
    for run in runs:
        config = read_config(run)
        seed = str(config.get("seed"))
        config = {key: value for key, value in config.items() if key not in OF_ONE_RUN}
        groups.setdefault(json.dumps(config, sort_keys=True, default=str), {})[seed] = run
    if len(groups) < 2 or all(len(of_one) == 1 for of_one in groups.values()):
        return [("", [run]) for run in runs]
    keys = [dict(flatten(json.loads(text))) for text in groups]
    every = dict.fromkeys(key for of_one in keys for key in of_one)
    differing = [key for key in every if len({of_one.get(key) for of_one in keys}) > 1]
    # lists repeat what other keys say, as the rates of an optimizer
    shown = [key for key in differing if not any(of_one.get(key, "")[:1] == "[" for of_one in keys)]
    names = [
        " ".join(f"{key}={of_one.get(key, '–')}" for key in (shown or differing)[:MOST_KEYS])
        for of_one in keys
    ]
    return [(name, [*group.values()]) for name, group in zip(names, groups.values(), strict=True)]


def told_apart(groups: Groups) -> str:
    """Compares two settings in a sentence; empty unless there are two, each of several seeds."""
    if len(groups) != 2:
        return ""
    results = {run: result(run) for _, runs in groups for run in runs}
    metrics = [results[runs[0]].metric for _, runs in groups]
    counted = {run: one for run, one in results.items() if one.state == "finished"} or results
    settings = []
    for name, runs in groups:
        found = {str(read_config(run).get("seed")): counted[run] for run in runs if run in counted}
        values = {seed: one.value for seed, one in found.items() if one.value is not None}
        settings.append(Setting(name, values))
    said = difference(settings[0], settings[1], metrics[0])
    if said and metrics[0] != metrics[1]:
        said = f"No comparison: the settings' metrics differ, {' and '.join(metrics)}."
    return said


def over_seeds(runs: Sequence[Payload]) -> Payload:
    """Returns a run in place of several: the means of their curves at the steps that all have, with
    the lowest and the highest as their spread. If some have finished, only those count.
    """
    states = [run["status"] for run in runs]
    runs = [run for run in runs if run["status"]["state"] == "finished"] or runs
    merged: Payload = {**runs[0], "seeds": len(runs), "scenes": [], "files": [], "log": []}
    merged |= {"timeline": [], "digests": [], "directory": f"{runs[0]['directory']} …"}
    merged["status"] = next((one for one in states if one["state"] != "finished"), states[0])
    merged["seconds"] = sum(run["seconds"] for run in runs) / len(runs)
    for kind in KINDS:
        merged[kind] = _mean_of([run[kind] for run in runs])
    if headline := merged["headline"]:
        lasts = {str(i): one["headline"]["last"] for i, one in enumerate(runs) if one["headline"]}
        known = {seed: last for seed, last in lasts.items() if last is not None}
        found = Setting("", known, headline["lower"]).summary()
        merged["headline"] = headline | found | {"last": found["mean"], "best": found["best"]}
    return merged


def _mean_of(tables: Sequence[Payload]) -> Payload:
    tables = [table for table in tables if table["step"]] or tables
    steps = sorted(set.intersection(*({*table["step"]} for table in tables)))

    def points(columns: Sequence[Sequence[float | None]]) -> list[list[float]]:
        """Returns the values at each step, without gaps."""
        known = [
            dict(zip(table["step"], column, strict=True))
            for table, column in zip(tables, columns, strict=True)
        ]
        return [
            [value for values in known if (value := values[step]) is not None] for step in steps
        ]

    curves = {}
    for name in set.intersection(*({*table["curves"]} for table in tables)):
        values = points([table["curves"][name]["mean"] for table in tables])
        curves[name] = {
            "mean": [sum(some) / len(some) if some else None for some in values],
            "min": [min(some, default=None) for some in values],
            "max": [max(some, default=None) for some in values],
        }
    seconds = points([table["seconds"] for table in tables])
    means = [sum(some) / len(some) for some in seconds]
    return {"step": steps, "seconds": means, "curves": curves}
