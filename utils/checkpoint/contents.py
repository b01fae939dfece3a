"""What a checkpoint must hold so that a run can go on from it; a manifest vouches for its bytes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.checkpoint import meta, tensorfiles
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import brief

PIECE = re.compile(r"shards\.(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.safetensors")
Table = dict[str, tuple[str, tuple[int, ...]]]  # of a shard: dtype and shape of its tensors


def problem(folder: Path) -> str:
    """Empty when nothing is missing and nothing contradicts; else one line: the file, and what is wrong with it."""
    try:
        told = meta.read(folder)
        meta.check_run(told, folder)
    except (OSError, ValueError) as error:
        return f"meta.json: {brief(error)}"
    return _tensors_problem(folder, told)


def pieces_in(folder: Path) -> dict[Path, range]:
    """The files that hold what shards remember, with the shards that their names tell."""
    found = {file: PIECE.fullmatch(file.name) for file in sorted(folder.iterdir())}
    return {file: range(int(match[1]), int(match[2]) + 1) for file, match in found.items() if match}


def _tensors_problem(folder: Path, told: Mapping[str, Any]) -> str:
    file, shards = folder, meta.config_of(told["config"])["shards"]
    try:
        pieces = pieces_in(folder)
        expected = {f"{group}.safetensors" for group in told["groups"]}
        for file in folder.glob("[!.]*.safetensors"):
            if file.name not in expected and file not in pieces:
                return f"{file.name}: not among the groups of meta.json"
        for file in sorted(folder / name for name in expected):
            tensorfiles.entries(file)
        tables: dict[int, Table] = {}
        for file, owned in pieces.items():
            if not 0 <= owned.start < owned.stop <= shards:
                return f"{file.name}: named by shards that the run, which has {shards}, has not"
            if trouble := _add_piece(tables, file, owned):
                return f"{file.name}: {trouble}"
    except (OSError, Unreadable) as error:
        return f"{file.name}: {brief(error) if isinstance(error, OSError) else error}"
    return _shards_problem(tables, shards)


def _add_piece(tables: dict[int, Table], file: Path, owned: range) -> str:
    """Every tensor is named by its shard, and belongs where the name of the file says."""
    if taken := [shard for shard in owned if shard in tables]:
        return f"holds shard {taken[0]}, as another file does"
    tables |= {shard: {} for shard in owned}
    names = {str(shard): shard for shard in owned}
    for name, entry in tensorfiles.entries(file).items():
        shard, _, rest = name.partition("/")
        if shard not in names:
            return f"holds {name[:60]}, which is of no shard that its name tells"
        tables[names[shard]][rest] = entry.dtype, entry.shape
    return ""


def _shards_problem(tables: Mapping[int, Table], shards: int) -> str:
    """All shards of the run are there, and alike."""
    for shard in range(shards):
        if shard not in tables:
            return f"shards: there is no state of shard {shard}"
        if differing := sorted(tables[shard].items() ^ tables[0].items()):
            return f"shards: {differing[0][0][:60]} of shard {shard} is not as that of shard 0"
    return ""
