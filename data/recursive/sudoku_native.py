"""The search of `sudoku` compiled from C: the same results, many times as fast."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from utils.native import library

SOURCE = Path(__file__).with_name("sudoku.c")
BYTES = 1 << 17  # of a geometry, at most
BOARDS = 1 << 14  # looked at between two chances for Ctrl-C


class Search(ctypes.Structure):
    """As in sudoku.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("limit", "most_guesses", "width")),
        *((name, ctypes.c_void_p) for name in ("counts", "guesses", "solutions")),
    )


@cache
def loaded() -> ctypes.CDLL | None:
    """The library; None where it cannot be compiled."""
    made = library(SOURCE)
    if made is not None:
        made.go_on.restype = ctypes.c_int64
    return made


@cache
def _geometry(native: ctypes.CDLL, size: int, units: bytes) -> ctypes.Array[Any]:
    described = ctypes.create_string_buffer(BYTES)
    native.describe(described, size, units)
    return described


def search(
    native: ctypes.CDLL,
    masks: np.ndarray,
    units: np.ndarray,
    limit: int,
    most_guesses: int,
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, guesses and solutions, as `sudoku.search` has them."""
    cells, boards = masks.shape
    described = _geometry(native, units.shape[1], units.astype(np.int64).tobytes())
    counts, guesses = np.zeros((2, boards), np.int64)
    solutions = np.zeros((boards, cells), np.uint16)
    to = Search(
        limit, most_guesses, width, counts.ctypes.data, guesses.ctypes.data, solutions.ctypes.data
    )
    room = depth = boards
    stack, owners = masks.T.astype(np.uint16, order="C"), np.arange(boards)
    while depth:
        if room < depth + min(width, depth):
            room = 2 * depth + min(width, depth)
            stack, owners = (_grown(array[:depth], room) for array in (stack, owners))
        depth = native.go_on(
            described,
            ctypes.byref(to),
            stack.ctypes.data_as(ctypes.c_void_p),
            owners.ctypes.data_as(ctypes.c_void_p),
            *(ctypes.c_int64(number) for number in (depth, room, BOARDS)),
        )
    return np.minimum(counts, limit), guesses, np.ascontiguousarray(solutions.T)


def _grown(array: np.ndarray, room: int) -> np.ndarray:
    grown = np.empty((room, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
