"""Files of tensors: read as safetensors or refused, never unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.checkpoint.slices import Slice
from utils.errors import brief
from utils.files import open_plain

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor, dtype

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
KINDS = {name: kind for kind, name in DTYPES.items()}
CHUNK = 1 << 22  # written, then hashed from the cache; smaller ones ask for the interpreter often
START = 512  # bytes by which a pickle is known
OLD_PICKLE = re.compile(rb"c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n|\([dl]p[0-9]+\n|[\]})]q.", re.DOTALL)


class Unreadable(ValueError):
    """Why a file of tensors is refused: the rest of a sentence that begins with its name."""

    def __init__(self, why: str, file: str = "") -> None:
        """`file` is for those who look into several files at once."""
        super().__init__(why)
        self.file = file


class Entry(NamedTuple):
    """One tensor of a file, or some rows of it, from the header."""

    dtype: str
    shape: tuple[int, ...]  # of what the file holds
    start: int  # in the file
    size: int
    first: int = 0  # the number of its first row, and how many the whole tensor has
    of: int = 1


def read(file: Path) -> dict[str, Tensor]:
    """Reads all tensors of a file into memory of their own.

    A view into the file may be unaligned, and BLAS rounds by alignment.
    """
    from safetensors import safe_open

    _refuse(file)
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except Exception as error:  # a dtype that PyTorch has not is refused in many ways
        raise _damaged(error, file) from None


def entries(file: Path) -> dict[str, Entry]:
    """The tensors in a file's header; needs no torch."""
    from safetensors import SafetensorError, safe_open

    _refuse(file)
    try:
        # the library has checked the header that is read here
        with safe_open(file, framework="np"), open_plain(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        rows = json.loads(header.pop("__metadata__", {}).get("rows", "{}"))
        return {name: _entry(stated, 8 + length, rows.get(name)) for name, stated in header.items()}
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise _damaged(error, file) from None


def _entry(stated: Mapping[str, Any], data: int, rows: Any) -> Entry:
    (start, end), shape = stated["data_offsets"], tuple(stated["shape"])
    first, of = rows or (0, shape[0] if shape else 1)
    if rows and not (shape and type(first) is type(of) is int and 0 <= first <= of - shape[0]):
        raise ValueError(f"rows {first} and {of} of a tensor of shape {list(shape)}")
    return Entry(stated["dtype"], shape, data + start, end - start, first, of)


def dtype_of(kind: str) -> dtype:
    """PyTorch's name of a type."""
    import torch

    torch_dtype = getattr(torch, DTYPES.get(kind, ""), None)
    if torch_dtype is None:
        raise Unreadable(f"holds tensors of type {kind}, which PyTorch {torch.__version__} has not")
    return torch_dtype


def write(file: Path, slices: Mapping[str, Slice]) -> dict[str, int | str]:
    """Writes contiguous tensors on the CPU to the disk; returns the manifest's entry for the file.

    Nothing is copied on the way, nor read again to be hashed.
    """
    # the widest types first, so that all tensors are aligned
    names = sorted(slices, key=lambda name: (-slices[name].tensor.element_size(), name))
    tensors = [slices[name].tensor for name in names]
    about, end = {"format": "pt"}, 0
    places = {name: (piece[1:], Slice.whole(piece.tensor)[1:]) for name, piece in slices.items()}
    if rows := {name: place for name, (place, whole) in places.items() if place != whole}:
        about["rows"] = json.dumps(rows)
    header: dict[str, Any] = {"__metadata__": about}
    for name, tensor in zip(names, tensors, strict=True):
        start, end = end, end + tensor.nbytes
        kind = KINDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with open(file, "wb", buffering=0) as stream:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for content in (head, *map(content_of, tensors)):
            while content:
                written = stream.write(content[:CHUNK])
                total.update(content[:written])
                content = content[written:]
        os.fsync(stream.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": total.hexdigest()}


def content_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _refuse(file: Path) -> None:
    """Refuses pickles and what is not a plain file."""
    try:
        with open_plain(file) as stream:
            start = stream.read(START)
    except OSError as error:
        raise _damaged(error, file) from None
    # A safetensors file begins with the length of its header, whose lower bytes can be any, those
    # of a pickle or a zip too.
    if start[4:9] != b"\0\0\0\0{" and _looks_like_a_pickle(start):
        raise Unreadable(
            "is a pickle, which could run any code and is never read here; convert it once: "
            f"python -m utils.checkpoint import {file} FOLDER",
            file.name,
        )


def _looks_like_a_pickle(start: bytes) -> bool:
    """Returns whether a file begins like a zip of torch.save or a bare pickle of any protocol."""
    if start[:4] == b"PK\3\4":
        return b"data.pkl" in start  # in the first name
    return (
        start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    ) or OLD_PICKLE.match(start) is not None


def _damaged(error: Exception, file: Path) -> Unreadable:
    return Unreadable(f"is damaged or cut short ({brief(error)})", file.name)
