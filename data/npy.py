"""Arrays of whole numbers from `.npy` files: what a header claims is compared with the file before
it is believed.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from utils.errors import brief
from utils.files import open_plain

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_array(path: Path, dimensions: int) -> np.ndarray:
    """Map a file's array; ValueError says what is wrong with it, OSError that it cannot be read."""
    with open_plain(path) as file:
        shape, fortran, dtype = _header(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        if dtype.kind not in "iu":
            raise ValueError(f"holds {dtype}, not whole numbers")
        if len(shape) != dimensions or not all(0 <= length < 2**63 for length in shape):
            raise ValueError(f"has shape {brief(shape)}")
        if size - start != (needed := math.prod(shape) * dtype.itemsize):
            raise ValueError(
                f"holds {size - start} bytes of values, but shape {shape} of {dtype} takes {needed}"
            )
        array = np.memmap(file, dtype, "r", start, shape, "F" if fortran else "C")
    # `take` would copy the whole of an array of another layout, every time; and plain views are
    # quicker to slice than the subclass
    return np.require(array.view(np.ndarray), requirements=["C", "A"])


def _header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return HEADERS[np.lib.format.read_magic(file)](file)
    except OSError:
        raise
    except Exception as error:
        # NumPy reads a header as a Python literal: damaged bytes make it raise nearly anything
        raise ValueError(f"cannot be read ({brief(error)})") from None
