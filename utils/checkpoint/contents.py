"""Checks that a checkpoint holds all that a run needs; the manifest covers only its bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from utils.checkpoint import meta, tensorfiles
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import brief

PIECE = re.compile(r"shards\.(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.safetensors")
Table = dict[str, tuple[str, tuple[int, ...]]]  # of a shard: dtype and shape of its tensors


def problem(folder: Path) -> str:
    """Empty if nothing is missing or contradictory; else one line with the file and the problem."""
    file = folder / "meta.json"
    try:
        stated = meta.read(folder)
        groups, shards = (
            {f"{group}.safetensors" for group in stated["groups"]},
            meta.check_run(stated, folder),
        )
        pieces = pieces_in(folder)
        for file in sorted(folder.glob("[!.]*.safetensors")):
            if file.name not in groups and file not in pieces:
                raise Unreadable("not among the groups of meta.json")
        for file in sorted(folder / name for name in groups):
            tensorfiles.entries(file)
        tables: dict[int, Table] = {}
        for file, owned in pieces.items():
            if not 0 <= owned.start < owned.stop <= shards:
                raise Unreadable(f"named by shards that the run, which has {shards}, has not")
            _add_piece(tables, file, owned)
        file = folder / "shards"
        _compare(tables, shards)
    except (OSError, ValueError) as error:
        return f"{file.name}: {brief(error)}"
    return ""


def pieces_in(folder: Path) -> dict[Path, range]:
    """The files with the state of shards, and the shards in their names."""
    matches = {file: PIECE.fullmatch(file.name) for file in sorted(folder.iterdir())}
    return {
        file: range(int(match[1]), int(match[2]) + 1) for file, match in matches.items() if match
    }


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
