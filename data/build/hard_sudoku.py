"""Sudoku boards that need search, made by several processes: the same boards however many there
are.
"""

from __future__ import annotations

import sys

import numpy as np

from data.build.workers import in_order, show, shown
from data.recursive import sudoku_native
from data.recursive.sudoku_hard import BOARDS, Hard, hard_boards, relabel_digits
from utils.errors import ConfigError

SIZE = 9  # smaller boards hardly need search, larger ones take too long
SLOWER = (
    "no C compiler works here (cc, or what CC names): the same boards take several times as long"
)


def hard_parts(
    counts: tuple[int, ...], min_guesses: int, seed: int, workers: int | None
) -> list[Hard]:
    """For each count that many puzzles; no two of their solved boards are alike up to the names of
    digits.
    """
    if min(counts) < 1:
        raise ConfigError(
            f"train={counts[0]} test={counts[-1]}: each part needs at least one board"
        )
    if min_guesses < 1:
        raise ConfigError(f"--min-guesses {min_guesses}: a hard board takes at least one; try 20")
    if sudoku_native.loaded() is None:
        print(SLOWER, file=sys.stderr, flush=True)
    wanted = [min(BOARDS, count - first) for count in counts for first in range(0, count, BOARDS)]
    made: list[Hard] = []
    show(f"0 of {sum(counts):,} boards")
    for part in in_order(
        hard_boards,
        ((SIZE, count, min_guesses, seed, job) for job, count in enumerate(wanted)),
        workers,
    ):
        made.append(part)
        show(f"{sum(len(one.puzzles) for one in made):,} of {sum(counts):,} boards")
    shown()
    whole = Hard(*(np.concatenate(parts) for parts in zip(*made, strict=True)))
    count, different = (
        len(whole.puzzles),
        len(np.unique(relabel_digits(whole.answers, SIZE), axis=0)),
    )
    if count < sum(counts):
        raise ConfigError(
            f"--min-guesses {min_guesses}: only {count} of {sum(counts)} boards found; ask for"
            " fewer guesses"
        )
    if different < count:
        raise ConfigError(
            f"--seed {seed}: {count - different} of the {count} boards came twice; try another seed"
        )
    return [
        Hard(*parts)
        for parts in zip(*(np.split(field, np.cumsum(counts)[:-1]) for field in whole), strict=True)
    ]
