"""Compares two runs that should be the same, and names the usual cause of such a difference."""

from __future__ import annotations

from pathlib import Path

from utils.report import same

# What differs from the first run in each of the others, and what usually depends on it
CAUSES = {
    "again": (
        "The same command gives another run each time. Usually: a generator without a seed, the"
        " order of a set or hash(), the time, a name that is random."
    ),
    "two ranks": (
        "Something depends on the rank, or on which shards are computed together. Usually: a mean"
        " in place of a sum, statistics over the rows of a batch, the rank as a seed, a buffer that"
        " forward changes, data that remembers what it gave."
    ),
    "resumed": (
        "Something is in no checkpoint. Usually: a counter, a cache or a generator in the net or"
        " the data, an attribute of the optimizer, a schedule that remembers."
    ),
    "parts": (
        "Something depends on which rows are computed together, in a pass or on a rank. Usually: a"
        " loss on the worst rows of the batch, a mean over rows, a gradient that a hook changes, a"
        " term that is added once a pass."
    ),
    "loader": (
        "The data remembers something between calls, or knows its process. train_batch may depend"
        " on the seed, the step and the shard alone."
    ),
}
ONLY_EVALUATION = (
    "The weights are the same, and evaluations differ. Usually: a set or a prediction that draws"
    " without a seed, an evaluator that counts on the order of batches."
)


def difference(one: Path, other: Path, way: str) -> tuple[str, str]:
    """Returns where two runs first differ and the usual cause; two empty texts if they are one."""
    found = same.compare(one, other)
    if found["same"]:
        return "", ""
    if found["same"] is None:
        return "they have no step in common", ""
    weights_are_same = all(each["same"] for each in found["checkpoints"])
    only_evaluation = weights_are_same and "metric eval/" in found["text"]
    return found["text"], ONLY_EVALUATION if only_evaluation else CAUSES[way]
