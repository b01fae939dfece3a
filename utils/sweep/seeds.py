"""Statistics over seeds: runs that differ in `seed` alone are runs of one setting."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05  # a difference is reported if it is rarer than this by chance
ROUNDING = 1e-6  # of the values; a spread below it is none


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
    from scipy import stats  # takes a second, and most sweeps have one seed

    half = float(stats.sem(values) * stats.t.ppf(0.975, count - 1))
    return mean, mean - half, mean + half


def difference(one: Setting, other: Setting, metric: str) -> str:
    """Compares two settings in a sentence: by a paired t-test if they have the same seeds, else by
    Welch's; empty if one of them has a single seed.
    """
    counts = len(one.values), len(other.values)
    if min(counts) < 2:
        return ""
    from scipy import stats

    paired = one.values.keys() == other.values.keys()
    here = [*one.values.values()]
    there = [other.values[seed] for seed in one.values] if paired else [*other.values.values()]
    with warnings.catch_warnings(action="ignore"):  # about values without any spread
        if paired:
            found, how = stats.ttest_rel(here, there), f"paired t-test over {counts[0]} seeds"
        else:
            found = stats.ttest_ind(here, there, equal_var=False)
            how = f"Welch's t-test, {counts[0]} and {counts[1]} seeds"
    means, ends = (np.mean(here), np.mean(there)), found.confidence_interval()
    names = f"{one.title} and {other.title}"
    values = f"{metric} is {means[0]:.4g} and {means[1]:.4g}, {means[0] - means[1]:+.3g}"
    # not true of NaN either
    if not ends.high - ends.low > ROUNDING * max(np.abs(means)):
        return f"No test of {names} is possible: {values} with no spread over the seeds."
    p = found.pvalue
    said = f"{names} differ" if p < LEVEL else f"No difference is shown between {names}"
    span = f"95 % interval {ends.low:+.3g} to {ends.high:+.3g}"
    return f"{said}: {values} ({span}, p = {p:.2g}; {how})."
