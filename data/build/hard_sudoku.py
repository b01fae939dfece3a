"""Sudoku boards that need search, made by several processes: the same boards however many there
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from data.build.workers import in_order, show, shown, tell
from data.recursive import sudoku_extreme, sudoku_native
from data.recursive.sudoku_hard import BOARDS, Hard, hard_boards, relabel_digits
from utils.errors import ConfigError

SIZE = 9  # smaller boards hardly need search, larger ones take too long
FEW = 4  # boards of one task: some take a minute
SLOWER = (
    "no C compiler works here (cc, or what CC names): the same boards take several times as long"
)


def hard_parts(
    counts: tuple[int, ...], min_guesses: int, seed: int, workers: int | None
) -> list[Hard]:
    """For each count that many puzzles, each of which takes as many guesses."""
    if min_guesses < 1:
        raise ConfigError(f"--min-guesses {min_guesses}: a hard board takes at least one; try 20")
    _check(counts)
    if sudoku_native.loaded() is None:
        print(SLOWER, file=sys.stderr, flush=True)
    wanted = [min(BOARDS, count - first) for count in counts for first in range(0, count, BOARDS)]
    tasks = ((SIZE, count, min_guesses, seed, job, tell) for job, count in enumerate(wanted))
    parts = _parts(hard_boards, tasks, counts, seed, workers)
    if (available := sum(len(part.puzzles) for part in parts)) < sum(counts):
        raise ConfigError(
            f"--min-guesses {min_guesses}: only {available} of {sum(counts)} boards found; ask for"
            " fewer guesses"
        )
    return parts


def extreme_parts(counts: tuple[int, ...], seed: int, workers: int | None) -> list[Hard]:
    """For each count that many puzzles, as hard as those of Sudoku-Extreme."""
    _check(counts)
    if sudoku_extreme.loaded() is None:
        raise ConfigError(
            "--hard extreme: needs a C compiler (cc, or what CC names), because numpy would take"
            " days; install one, or leave out extreme"
        )
    rng = np.random.default_rng([seed, SIZE])
    wanted = np.concatenate([sudoku_extreme.wanted_levels(count, rng) for count in counts])
    tasks = (
        (wanted[first : first + FEW], seed, first, tell) for first in range(0, len(wanted), FEW)
    )
    return _parts(sudoku_extreme.extreme_boards, tasks, counts, seed, workers)


def _check(counts: tuple[int, ...]) -> None:
    if min(counts) < 1:
        raise ConfigError(
            f"train={counts[0]} test={counts[-1]}: each part needs at least one board"
        )


def _parts(
    make: Callable[..., Hard],
    tasks: Iterable[tuple[Any, ...]],
    counts: tuple[int, ...],
    seed: int,
    workers: int | None,
) -> list[Hard]:
    """Returns the boards that the tasks make, in parts of these sizes. Refuses a seed that makes a
    solved board twice, up to the names of digits.
    """

    def told(done: int) -> None:
        show(f"{done:,} of {sum(counts):,} boards")

    made = list(in_order(make, tasks, workers, told))
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
