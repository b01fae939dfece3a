"""Sudoku boards that need search, made by several processes: the same boards however many there
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from data.build.workers import in_order, show, shown, tell
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
    """For each count that many puzzles, each of which takes as many guesses."""
    if min_guesses < 1:
        raise ConfigError(f"--min-guesses {min_guesses}: a hard board takes at least one; try 20")
    parts = _parts(hard_boards, (min_guesses,), counts, seed, workers)
    if (available := sum(len(part.puzzles) for part in parts)) < sum(counts):
        raise ConfigError(
            f"--min-guesses {min_guesses}: only {available} of {sum(counts)} boards found; ask for"
            " fewer guesses"
        )
    return parts


def _parts(
    make: Callable[..., Hard],
    options: tuple[int, ...],
    counts: tuple[int, ...],
    seed: int,
    workers: int | None,
) -> list[Hard]:
    """The parts, by several processes; no two of their solved boards are alike up to the names of
    digits.
    """
    if min(counts) < 1:
        raise ConfigError(
            f"train={counts[0]} test={counts[-1]}: each part needs at least one board"
        )
    if sudoku_native.loaded() is None:
        print(SLOWER, file=sys.stderr, flush=True)
    wanted = [min(BOARDS, count - first) for count in counts for first in range(0, count, BOARDS)]

    def told(done: int) -> None:
        show(f"{done:,} of {sum(counts):,} boards")

    told(0)
    made = list(
        in_order(
            make,
            ((SIZE, count, *options, seed, job, tell) for job, count in enumerate(wanted)),
            workers,
            told,
        )
    )
    told(sum(len(part.puzzles) for part in made))
    shown()
    boards = Hard(*(np.concatenate(parts) for parts in zip(*made, strict=True)))
    count = len(boards.puzzles)
    different = len(np.unique(relabel_digits(boards.answers, SIZE), axis=0))
    if different < count:
        raise ConfigError(
            f"--seed {seed}: {count - different} of the {count} boards came twice; try another seed"
        )
    return [
        Hard(*parts)
        for parts in zip(
            *(np.split(field, np.cumsum(counts)[:-1]) for field in boards), strict=True
        )
    ]
