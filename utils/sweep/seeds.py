"""Statistics over seeds: runs that differ in `seed` alone are runs of one setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # differences that are rarer by chance are said to be one


@dataclass(frozen=True)
class Setting:
    """The results of the runs of one setting, by their seeds."""

    title: str
    values: Mapping[str, float]
    lower: bool = False  # whether the lower is the better

    def summary(self) -> dict[str, float | None]:
        """Returns the number of seeds, the mean with its 95 % interval, the best and the worst."""
        values = sorted(self.values.values(), reverse=not self.lower)
        if not values:
            return dict.fromkeys(("mean", "low", "high", "best", "worst")) | {"n": 0}
        mean, low, high = interval(values)
        ends = {"best": values[0], "worst": values[-1]}
        return {"n": len(values), "mean": mean, "low": low, "high": high, **ends}


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Returns the mean and its 95 % interval by Student's t, which takes two values or more."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, None, None
    half = _quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half


def difference(one: Setting, other: Setting, metric: str) -> str:
    """Compares two settings in a sentence: by a paired t-test if they have the same seeds, else by
    Welch's; empty if one of them has a single seed.
    """
    if min(len(one.values), len(other.values)) < 2:
        return ""
    means = [float(np.mean([*setting.values.values()])) for setting in (one, other)]
    gap = means[0] - means[1]
    if one.values.keys() == other.values.keys():
        gaps = [value - other.values[seed] for seed, value in one.values.items()]
        error, freedom = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)), len(gaps) - 1.0
        how = f"paired t-test over {len(gaps)} seeds"
    else:
        counts = len(one.values), len(other.values)
        parts = [
            float(np.var([*setting.values.values()], ddof=1)) / count
            for setting, count in zip((one, other), counts, strict=True)
        ]
        error = math.sqrt(sum(parts))
        weights = sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
        freedom = sum(parts) ** 2 / weights if weights else 1.0
        how = f"Welch's t-test, {counts[0]} and {counts[1]} seeds"
    half = _quantile(freedom) * error
    chance = 2 * float(stdtr(freedom, -abs(gap) / error)) if error else float(not gap)
    names = f"{one.title} and {other.title}"
    found = f"{names} differ" if chance < LEVEL else f"No difference is shown between {names}"
    return (
        f"{found}: {metric} is {means[0]:.4g} and {means[1]:.4g}, {gap:+.3g} (95 % interval"
        f" {gap - half:+.3g} to {gap + half:+.3g}, p = {chance:.2g}; {how})."
    )


def _quantile(freedom: float) -> float:
    """Returns within how many standard errors 95 % lie."""
    return float(stdtrit(freedom, 0.975))
