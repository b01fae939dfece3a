"""The files of a checkpoint: one of safetensors for each group of tensors, and a manifest with the
size and sha256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import brief
from utils.files import open_plain, read_text

if TYPE_CHECKING:  # the digest and the report page do without, and are a second faster
    from torch import Tensor

MANIFEST, META = "manifest.json", "meta.json"
SUFFIX = ".safetensors"
TYPES = {
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
}
KINDS = {name: kind for kind, name in TYPES.items()}
# what reading JSON of any content, and what it says of the file, may raise
DAMAGE = (
    OSError, ValueError, TypeError, KeyError, AttributeError,
    RecursionError, OverflowError, MemoryError,
)  # fmt: skip
CHUNK = 1 << 22  # bytes written, then hashed from the cache


class Unreadable(ValueError):
    """A file that is damaged, or is not what it should be."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file.name}: {why}")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    start: int  # of its bytes
    size: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def meta(self) -> Tensor:
        """Type and shape without content."""
        import torch

        if self.dtype not in TYPES:
            raise Unreadable(self.file, f"{self.dtype} is a type that is not read here")
        return torch.empty(self.shape, dtype=getattr(torch, TYPES[self.dtype]), device="meta")

    def read(self) -> Tensor:
        """Reads a copy: a view into the file may be unaligned, and BLAS rounds by alignment."""
        import torch

        # a plan builds nets on the meta device, where nothing could be read
        out = torch.empty(self.shape, dtype=self.meta.dtype, device="cpu")
        self.read_into(content_of(out))
        return out

    def read_into(self, content: memoryview) -> None:
        """Fills memory with its bytes."""
        with open_plain(self.file) as stream:
            stream.seek(self.start)
            while content and (count := stream.readinto(content)):
                content = content[count:]
        if content:
            raise Unreadable(self.file, "cut short")


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Puts the widest types first, so that all tensors in a file are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return {name: tensors[name] for name in names}


def content_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write(file: Path, shapes: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> dict[str, Any]:
    """Writes a file to the disk; returns its entry in the manifest. Takes contiguous tensors on the
    CPU from an iterator, one for each of `shapes`.

    Nothing is copied on the way, nor read again to be hashed.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + shape.nbytes
        kind = KINDS[str(shape.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": [*shape.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    total = hashlib.sha256()
    with open(file, "wb", buffering=0) as stream:
        for content in chain([head], map(content_of, islice(tensors, len(shapes)))):
            while content:
                written = stream.write(content[:CHUNK])
                total.update(content[:written])
                content = content[written:]
        os.fsync(stream.fileno())
    return {"bytes": len(head) + end, "sha256": total.hexdigest()}


def read_header(file: Path) -> dict[str, Stored]:
    """Returns the tensors in a file."""
    from safetensors import SafetensorError, safe_open

    try:
        # the library checks that all tensors lie within the file
        with open_plain(file) as stream, safe_open(file, framework="np"):
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, about in header.items():
            start, end = about["data_offsets"]
            place = 8 + length + start, end - start
            tensors[name] = Stored(file, *place, about["dtype"], tuple(about["shape"]))
        return tensors
    # a disk may return other bytes than the library has just read
    except (*DAMAGE, SafetensorError) as error:
        raise Unreadable(file, f"cannot be read ({brief(error)})") from None


def write_manifest(folder: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Writes the manifest of a folder to the disk."""
    write_text(folder / MANIFEST, _manifest(files))


def _manifest(files: Mapping[str, dict[str, Any]]) -> str:
    """The manifest as text, with a sha256 of its content."""
    known = {name: dict(entry) for name, entry in sorted(files.items())}
    own = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({"files": known, "sha256": own}, indent=1) + "\n"


def write_text(file: Path, text: str) -> dict[str, Any]:
    """Writes a text to the disk; returns its entry in the manifest."""
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    content = text.encode()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of a folder's files by name. Raises Unreadable."""
    file = folder / MANIFEST
    try:
        text = read_text(file)
        files = json.loads(text)["files"]
        if text != _manifest(files):
            raise ValueError("its own sha256 differs")
        return files
    except FileNotFoundError:
        raise Unreadable(file, "missing") from None
    except DAMAGE as error:
        raise Unreadable(file, f"cannot be read ({brief(error)})") from None


def check_file(file: Path, entry: Mapping[str, Any], hashed: bool) -> None:
    """Raises Unreadable unless a file has the size and, if `hashed`, the sha256 of its entry."""
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise Unreadable(file, f"{size} of {entry['bytes']} bytes")
        if hashed and sha256_of(file) != entry["sha256"]:
            raise Unreadable(file, "sha256 differs")
    except FileNotFoundError:
        raise Unreadable(file, "missing") from None
    except OSError as error:
        raise Unreadable(file, f"cannot be read ({brief(error)})") from None


def sha256_of(file: Path) -> str:
    """Hashes a file."""
    total = hashlib.sha256()
    hash_into(total, file, 0, file.stat().st_size)
    return total.hexdigest()


def hash_into(total: Any, file: Path, start: int, size: int) -> None:
    """Adds some bytes of a file to a hash."""
    chunk = memoryview(bytearray(min(CHUNK, max(1, size))))
    with open_plain(file) as stream:
        stream.seek(start)
        while size > 0 and (count := stream.readinto(chunk[: min(CHUNK, size)])):
            total.update(chunk[:count])
            size -= count
