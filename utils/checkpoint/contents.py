"""The contents of a checkpoint, in whatever files its tensors lie, and whether they are complete,
which the manifest cannot tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from utils.checkpoint import meta, tensorfiles
from utils.checkpoint.tensorfiles import Entry, Unreadable
from utils.errors import brief
from utils.files import open_plain

if TYPE_CHECKING:  # the digest does without, and answers a second earlier
    from torch import Tensor

SHARDS = re.compile(r"shards\.(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.safetensors")
# of a group that several ranks have written, or one rank in several files
PART = re.compile(r"([^.]+)(\.(0|[1-9][0-9]*)(-(0|[1-9][0-9]*))?)?\.safetensors")
Table = dict[str, tuple[str, tuple[int, ...]]]  # of a shard: dtype and shape of its tensors


@dataclass
class Stored:
    """A tensor of a checkpoint, whose rows may lie in several files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Path, Entry]] = field(default_factory=list)  # in the order of their rows

    @property
    def size(self) -> int:
        return sum(entry.size for _, entry in self.pieces)

    def lying_in(self, first: int, stop: int) -> list[tuple[Path, Entry]]:
        """The pieces that hold some of these rows."""
        return [
            (file, entry)
            for file, entry in self.pieces
            if max(first, entry.first) < min(stop, entry.first + _rows(entry.shape))
        ]

    def read_into(self, out: Tensor, first: int = 0) -> None:
        """Fills a contiguous tensor of this type on the CPU with rows, from `first` on."""
        rows = _rows(tuple(out.shape))
        if not out.numel():
            return
        size = out.nbytes // rows
        content = tensorfiles.content_of(out)
        for file, entry in self.lying_in(first, first + rows):
            begin = max(first, entry.first)
            end = min(first + rows, entry.first + _rows(entry.shape))
            into = content[(begin - first) * size : (end - first) * size]
            with open_plain(file) as stream:
                stream.seek(entry.start + (begin - entry.first) * size)
                while into and (count := stream.readinto(into)):
                    into = into[count:]
            if into:
                raise OSError(f"{file.name} is cut short")

    def read(self, first: int = 0, stop: int | None = None) -> Tensor:
        """These rows, by default all, in memory of their own.

        A view into the file may be unaligned, and BLAS rounds by alignment.
        """
        import torch

        shape = self.shape
        if shape and stop is not None:
            shape = (stop - first, *shape[1:])
        # a plan builds nets on the meta device, where nothing could be read
        out = torch.empty(shape, dtype=tensorfiles.dtype_of(self.dtype), device="cpu")
        self.read_into(out, first)
        return out

    @property
    def meta(self) -> Tensor:
        """Type and shape without content."""
        import torch

        return torch.empty(self.shape, dtype=tensorfiles.dtype_of(self.dtype), device="meta")


def problem(folder: Path) -> str:
    """Empty if nothing is missing or contradictory; else one line with the file and the problem."""
    file = folder / "meta.json"
    try:
        stated = meta.read(folder)
        shards = meta.check_run(stated, folder)
        for file in sorted(folder.glob("[!.]*.safetensors")):
            if not SHARDS.fullmatch(file.name) and group_of(file.name) not in stated["groups"]:
                raise Unreadable("not among the groups of meta.json")
        for group in sorted(stated["groups"]):
            file = folder / f"{group}.safetensors"
            find_group(folder, group)
        tables: dict[int, Table] = {}
        for file, owned in pieces_in(folder).items():
            if not 0 <= owned.start < owned.stop <= shards:
                raise Unreadable(f"named by shards that the run, which has {shards}, has not")
            _add_piece(tables, file, owned)
        file = folder / "shards"
        _compare(tables, shards)
    except Unreadable as error:
        return f"{error.file or file.name}: {error}"
    except (OSError, ValueError) as error:
        return f"{file.name}: {brief(error)}"
    return ""


def shards_of(name: str) -> range:
    """The shards whose state a file holds, by its name."""
    match = SHARDS.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def group_of(name: str) -> str:
    """Returns the group whose tensors a file of this name holds, or an empty string."""
    match = PART.fullmatch(name)
    return match[1] if match and match[1] != "shards" else ""


def find_group(folder: Path, group: str) -> dict[str, Stored]:
    """Returns the tensors of a group. Raises Unreadable unless each is complete."""
    files = [
        file for file in sorted(folder.glob("[!.]*.safetensors")) if group_of(file.name) == group
    ]
    return find_tensors(files or [folder / f"{group}.safetensors"])


def find_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Returns the tensors in these files. Raises Unreadable unless each is complete."""
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, entry in tensorfiles.entries(file).items():
            shape = (entry.of, *entry.shape[1:]) if entry.shape else ()
            tensor = tensors.setdefault(name, Stored(entry.dtype, shape))
            if (tensor.dtype, tensor.shape) != (entry.dtype, shape):
                raise Unreadable(f"holds another {name[:60]} than the other files", file.name)
            tensor.pieces.append((file, entry))
    for name, tensor in tensors.items():
        tensor.pieces.sort(key=lambda piece: (piece[1].first, piece[1].size))
        reached = 0
        for file, entry in tensor.pieces:
            if entry.first != reached:
                why = f"holds {name[:60]} from row {entry.first} on, and the others up to {reached}"
                raise Unreadable(why, file.name)
            reached += _rows(entry.shape)
        if reached != _rows(tensor.shape):
            raise Unreadable(f"holds no rows of {name[:60]} from {reached} on", file.name)
    return tensors


def pieces_in(folder: Path) -> dict[Path, range]:
    """The files with the state of shards, and the shards in their names."""
    files = [file for file in sorted(folder.iterdir()) if SHARDS.fullmatch(file.name)]
    return {file: shards_of(file.name) for file in files}


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _add_piece(tables: dict[int, Table], file: Path, owned: range) -> None:
    """Adds a file's tensors to the tables; each belongs to a shard in the file's name."""
    if taken := [shard for shard in owned if shard in tables]:
        raise Unreadable(f"holds shard {taken[0]}, as another file does")
    tables |= {shard: {} for shard in owned}
    names = {str(shard): shard for shard in owned}
    for name, entry in tensorfiles.entries(file).items():
        shard, _, rest = name.partition("/")
        if shard not in names:
            raise Unreadable(f"holds {name[:60]}, which is of no shard that its name tells")
        tables[names[shard]][rest] = entry.dtype, entry.shape


def _compare(tables: Mapping[int, Table], shards: int) -> None:
    """Refuses missing shards, and shards that differ in names, types or shapes."""
    for shard in range(shards):
        if shard not in tables:
            raise Unreadable(f"there is no state of shard {shard}")
        if differing := sorted(tables[shard].items() ^ tables[0].items()):
            raise Unreadable(f"{differing[0][0][:60]} of shard {shard} is not as that of shard 0")
