"""The files of a checkpoint: safetensors, which may hold some rows of a tensor, and a manifest with
the size and sha256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.errors import brief
from utils.files import open_plain, read_text
from utils.rows import RowRange

if TYPE_CHECKING:  # the digest and the report page do without, and are a second faster
    import torch
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
FileEntry = Mapping[str, int | str]  # of the manifest: `bytes` and `sha256`


class Unreadable(ValueError):
    """A file that is damaged, or is not what it should be."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file.name}: {why}")


class Slice(NamedTuple):
    """Some rows of a tensor, in memory."""

    tensor: Tensor
    rows: RowRange

    @classmethod
    def whole(cls, tensor: Tensor) -> Slice:
        rows = len(tensor) if tensor.ndim else 1
        return cls(tensor, RowRange(0, rows, rows))


class FileSlice(NamedTuple):
    """Some rows of a tensor, in a file."""

    file: Path
    start: int  # of its bytes
    size: int
    dtype: str
    shape: tuple[int, ...]  # of these rows
    rows: RowRange


@dataclass
class Stored:
    """A tensor whose rows lie in one or several files."""

    dtype: str
    shape: tuple[int, ...]
    slices: list[FileSlice] = field(default_factory=list)  # in the order of their rows

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.slices)

    @property
    def meta(self) -> Tensor:
        """Type and shape without content."""
        import torch

        return torch.empty(self.shape, dtype=self._torch_dtype, device="meta")

    @property
    def _torch_dtype(self) -> torch.dtype:
        import torch

        if self.dtype not in TYPES:
            raise Unreadable(self.slices[0].file, f"{self.dtype} is a type that is not read here")
        return getattr(torch, TYPES[self.dtype])

    def holding(self, first: int, stop: int) -> list[FileSlice]:
        """The slices that hold some of these rows."""
        return [
            piece
            for piece in self.slices
            if max(first, piece.rows.first) < min(stop, piece.rows.stop)
        ]

    def read(self, first: int = 0, stop: int | None = None) -> Tensor:
        """Reads these rows, by default all, into memory of their own.

        A view into the file may be unaligned, and BLAS rounds by alignment.
        """
        import torch

        shape = self.shape
        if shape and stop is not None:
            shape = (stop - first, *shape[1:])
        # a plan builds nets on the meta device, where nothing could be read
        out = torch.empty(shape, dtype=self._torch_dtype, device="cpu")
        self.read_into(out, first)
        return out

    def read_into(self, out: Tensor, first: int = 0) -> None:
        """Fills a contiguous tensor of this type on the CPU with rows, from `first` on."""
        if not out.numel():
            return
        rows = len(out) if out.ndim else 1
        size = out.nbytes // rows
        content = content_of(out)
        for piece in self.holding(first, first + rows):
            begin, end = max(first, piece.rows.first), min(first + rows, piece.rows.stop)
            into = content[(begin - first) * size : (end - first) * size]
            with open_plain(piece.file) as stream:
                stream.seek(piece.start + (begin - piece.rows.first) * size)
                while into and (count := stream.readinto(into)):
                    into = into[count:]
            if into:
                raise Unreadable(piece.file, "cut short")


def content_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def share_of(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Slice]:
    """Returns what one rank writes of tensors that all ranks hold.

    Laid end to end, they are cut into shares of nearly equal bytes. A row belongs to the share in
    which its first byte lies.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    edges = total * rank // ranks, total * (rank + 1) // ranks
    share: dict[str, Slice] = {}
    at = 0
    for name, tensor in tensors.items():
        whole = Slice.whole(tensor)
        rows = whole.rows.of
        if tensor.nbytes:
            size = tensor.nbytes // rows
            first, stop = (min(max(-(-(edge - at) // size), 0), rows) for edge in edges)
            if stop - first == rows:
                share[name] = whole
            elif stop > first:
                share[name] = Slice(tensor[first:stop], RowRange(first, stop, rows))
        elif rank == 0:
            share[name] = whole
        at += tensor.nbytes
    return share


def write(file: Path, slices: Mapping[str, Slice]) -> FileEntry:
    """Writes contiguous tensors on the CPU to the disk; returns the file's entry in the manifest.

    Nothing is copied on the way, nor read again to be hashed.
    """
    # the widest types first, so that all tensors are aligned
    names = sorted(slices, key=lambda name: (-slices[name].tensor.element_size(), name))
    about, end = {"format": "pt"}, 0
    rows = {name: each.rows for name, each in slices.items() if each != Slice.whole(each.tensor)}
    if rows:
        about["rows"] = json.dumps({name: [each.first, each.of] for name, each in rows.items()})
    header: dict[str, Any] = {"__metadata__": about}
    for name in names:
        tensor = slices[name].tensor
        start, end = end, end + tensor.nbytes
        kind = KINDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with open(file, "wb", buffering=0) as stream:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for content in (head, *(content_of(slices[name].tensor) for name in names)):
            while content:
                written = stream.write(content[:CHUNK])
                total.update(content[:written])
                content = content[written:]
        os.fsync(stream.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": total.hexdigest()}


def find_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Returns the tensors in these files. Raises Unreadable unless they hold every row once."""
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, piece in read_header(file).items():
            shape = (piece.rows.of, *piece.shape[1:]) if piece.shape else ()
            stored = tensors.setdefault(name, Stored(piece.dtype, shape))
            if (stored.dtype, stored.shape) != (piece.dtype, shape):
                raise Unreadable(file, f"holds another {name[:60]} than the other files")
            stored.slices.append(piece)
    for name, stored in tensors.items():
        stored.slices.sort(key=lambda piece: (piece.rows, piece.size))
        reached = 0
        for piece in stored.slices:
            if piece.rows.first != reached:
                why = f"holds {name[:60]} from row {piece.rows.first} on, others end at {reached}"
                raise Unreadable(piece.file, why)
            reached = piece.rows.stop
        if reached != stored.slices[-1].rows.of:
            last = stored.slices[-1]
            raise Unreadable(last.file, f"rows of {name[:60]} are missing from {reached} on")
    return tensors


def read_header(file: Path) -> dict[str, FileSlice]:
    """Returns the tensors, or rows of tensors, that a file holds."""
    from safetensors import SafetensorError, safe_open

    try:
        # the library checks that all tensors lie within the file
        with open_plain(file) as stream, safe_open(file, framework="np"):
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        rows = json.loads(header.pop("__metadata__", {}).get("rows", "{}"))
        return {
            name: _slice(file, about, 8 + length, rows.get(name)) for name, about in header.items()
        }
    # a disk may give other bytes than it has just given the library
    except (*DAMAGE, SafetensorError) as error:
        raise Unreadable(file, f"cannot be read ({brief(error)})") from None


def _slice(file: Path, about: Mapping[str, Any], data: int, place: Any) -> FileSlice:
    (start, end), shape = about["data_offsets"], tuple(about["shape"])
    count = shape[0] if shape else 1
    first, of = map(int, place or (0, count))
    if not 0 <= first <= of - count:
        raise ValueError(f"{count} rows from {first} on, of {of}")
    rows = RowRange(first, first + count, of)
    return FileSlice(file, data + start, end - start, about["dtype"], shape, rows)


def write_manifest(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Writes the manifest of a folder to the disk."""
    write_text(folder / MANIFEST, _manifest(files))


def _manifest(files: Mapping[str, FileEntry]) -> str:
    """The manifest as text, with a sha256 of its own content."""
    known = {name: dict(entry) for name, entry in sorted(files.items())}
    own = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({"files": known, "sha256": own}, indent=1) + "\n"


def write_text(file: Path, text: str) -> FileEntry:
    """Writes a text to the disk; returns its entry in the manifest."""
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    content = text.encode()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def read_manifest(folder: Path) -> dict[str, FileEntry]:
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


def check_file(file: Path, entry: FileEntry, hashed: bool) -> None:
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
