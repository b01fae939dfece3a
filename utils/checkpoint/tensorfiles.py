"""Files of tensors: read as safetensors or refused, never unpickled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.errors import brief
from utils.files import open_plain

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor

START = 512  # bytes by which a pickle is known
OLD_PICKLE = re.compile(rb"c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\([dl]p[0-9]+\n|[\]})]q.", re.DOTALL)


class Unreadable(ValueError):
    """Why a file of tensors is refused: the rest of a sentence that begins with its name."""


class Entry(NamedTuple):
    """One tensor of a file, from the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    size: int


def read(file: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Reads the tensors whose names have one of these prefixes, into memory of their own.

    A view into the file may be unaligned, and BLAS rounds by alignment.
    """
    from safetensors import safe_open

    _refuse(file)
    try:
        with safe_open(file, framework="pt") as opened:
            wanted = [key for key in opened.keys() if key.startswith(prefixes)]  # noqa: SIM118
            return {key: opened.get_tensor(key).clone() for key in wanted}
    except Exception as error:  # a dtype that PyTorch has not is refused in many ways
        raise _damaged(error) from None


def entries(file: Path) -> dict[str, Entry]:
    """The tensors in a file's header; needs no torch."""
    from safetensors import SafetensorError, safe_open

    _refuse(file)
    try:
        # the library has checked the header that is read here
        with safe_open(file, framework="np"), open_plain(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(error) from None
    listed = {}
    for name, stated in header.items():
        if name != "__metadata__":
            start, end = stated["data_offsets"]
            listed[name] = Entry(
                stated["dtype"], tuple(stated["shape"]), 8 + length + start, end - start
            )
    return listed


def _refuse(file: Path) -> None:
    """Refuses pickles and what is not a plain file."""
    try:
        with open_plain(file) as stream:
            start = stream.read(START)
    except OSError as error:
        raise _damaged(error) from None
    # A safetensors file begins with the length of its header, whose lower bytes can be any, those
    # of a pickle or a zip too.
    if start[4:9] != b"\0\0\0\0{" and _looks_like_a_pickle(start):
        raise Unreadable(
            "is a pickle, which could run any code and is never read here; convert it once: "
            f"python -m utils.checkpoint import {file} FOLDER"
        )


def _looks_like_a_pickle(start: bytes) -> bool:
    """Whether a file begins like a zip of torch.save or a bare pickle of any protocol."""
    if start[:4] == b"PK\3\4":
        return b"data.pkl" in start  # in the first name
    return (
        start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    ) or OLD_PICKLE.match(start) is not None


def _damaged(error: Exception) -> Unreadable:
    return Unreadable(f"is damaged or cut short ({brief(error)})")
