"""Finds whether two runs are the same to the bit, and where they first differ."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import brief, visible
from utils.files import open_plain
from utils.report.evaluations import STEP
from utils.report.reading import digests, read_events
from utils.report.rows import Row, read_rows

HEADER_LIMIT = 1 << 27
CHUNK = 1 << 23
LEARNED = ("train/", "eval/")  # times and speeds differ between runs that are the same
MOST_TENSORS = 30
COMPARED_BYTES = 1 << 27  # of a tensor whose values are compared, beyond its bits
# number of its first row, rows of the whole tensor, dtype, shape, place (file, offset, size)
Piece = tuple[int, int, str, tuple[int, ...], tuple[Path, int, int]]


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor's bytes: a file, their offset in it, and their number."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, _, size in self.pieces)

    def content(self) -> Iterator[bytes]:
        """Yields all its bytes, in chunks."""
        for file, start, left in self.pieces:
            with open_plain(file) as stream:
                stream.seek(start)
                while left > 0 and (data := stream.read(min(left, CHUNK))):
                    yield data
                    left -= len(data)

    def sha256(self) -> str:
        total = hashlib.sha256(f"{self.dtype} {self.shape}".encode())
        for data in self.content():
            total.update(data)
        return total.hexdigest()

    def values(self) -> Any:
        """Returns an array of float64, or None for dtypes that it cannot hold."""
        import numpy as np

        data = b"".join(self.content())
        if self.dtype == "BF16":
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
        kind = kinds.get(self.dtype)
        return np.frombuffer(data, kind).astype(np.float64) if kind else None


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Compares two runs: their metrics, and their checkpoints of the same steps."""
    metrics = _compare_rows(_by_step(one), _by_step(other))
    checkpoints = [
        _compare_checkpoints(step, one / "checkpoints", other / "checkpoints")
        for step in sorted(_steps(one) & _steps(other))
    ]
    recorded = _compare_digests(one, other)
    first = next((each for each in checkpoints if not each["same"]), None)
    return {
        "metrics": metrics,
        "checkpoints": checkpoints,
        "recorded": recorded,
        "first": first,
        "verdict": _verdict(metrics, checkpoints, recorded),
    }


def _verdict(
    metrics: Mapping[str, Any], checkpoints: Sequence[Row], recorded: Sequence[Row]
) -> dict[str, Any]:
    """Returns whether all that can be compared is the same, and a line that says so."""
    differences = []
    broken = next((each for each in checkpoints if not each["same"]), None)
    digest = next((each for each in recorded if not each["same"]), None)
    if metrics["differs"]:
        at = metrics["differs"]
        values = f"{at['values'][0]!r} and {at['values'][1]!r}"
        differences.append((at["step"], f"metric {at['name']} ({values})"))
    if broken and broken["unreadable"]:
        differences.append((broken["step"], f"the checkpoint: {broken['unreadable']}"))
    elif broken:
        tensor = broken["tensors"][0]["name"]
        differences.append((broken["step"], f"tensor {tensor} of the checkpoint"))
    if digest and (not broken or digest["step"] < broken["step"]):
        differences.append((digest["step"], "the recorded digest of the checkpoint"))
    if differences:
        step = min(step for step, _ in differences)
        places = "; ".join(f"step {at:,}: {what}" for at, what in sorted(differences))
        return {"same": False, "step": step, "text": f"First difference: {places}."}
    seen = [f"{metrics['steps']:,} logged steps"] if metrics["steps"] else []
    compared = {each["step"] for each in (*checkpoints, *recorded)}
    if compared:
        seen.append(f"{len(compared)} checkpoint{'s' * (len(compared) > 1)}")
    if not seen:
        return {"same": None, "step": None, "text": "Nothing to compare: no step in common."}
    bits = "The same to the bit" if compared else "The same metrics; no checkpoint to compare"
    return {"same": True, "step": None, "text": f"{bits}: {' and '.join(seen)} compared."}


def _by_step(directory: Path) -> dict[int, dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_rows(directory / "metrics.jsonl"):
        learned = {name: row[name] for name in row if name.startswith(LEARNED)}
        by_step.setdefault(row["step"], {}).update(learned)
    return by_step


def _compare_rows(one: Mapping[int, Row], other: Mapping[int, Row]) -> dict[str, Any]:
    """Returns the first step with a metric that differs, among the steps that both have logged."""
    common = sorted(one.keys() & other.keys())
    for step in common:
        names = sorted(one[step].keys() & other[step].keys())
        for name in sorted(names, key=lambda name: (name != "train/loss", name)):
            values = [one[step][name], other[step][name]]
            if values[0] != values[1]:
                same = sum(each < step for each in common)
                return {"steps": same, "differs": {"step": step, "name": name, "values": values}}
    return {"steps": len(common), "differs": None}


def _steps(directory: Path) -> set[int]:
    try:
        names = [each.name for each in (directory / "checkpoints").iterdir()]
    except OSError:
        return set()
    return {int(named[1]) for name in names if (named := STEP.fullmatch(name))}


def _compare_digests(one: Path, other: Path) -> list[dict[str, Any]]:
    """Compares the digests that both have recorded, also those of deleted checkpoints."""
    mine, theirs = (
        {each["step"]: each["digest"] for each in digests(read_events(run)) if each["digest"]}
        for run in (one, other)
    )
    return [
        {"step": step, "same": mine[step] == theirs[step], "digests": [mine[step], theirs[step]]}
        for step in sorted(mine.keys() & theirs.keys())
    ]


def _compare_checkpoints(step: int, one: Path, other: Path) -> dict[str, Any]:
    return {"step": step, **compare_folders(*(each / f"step_{step}" for each in (one, other)))}


def compare_folders(one: Path, other: Path) -> dict[str, Any]:
    """Compares two checkpoints tensor by tensor, the model's first: all else follows from them.

    What cannot be read is not the same: `unreadable` says which file, and why.
    """
    try:
        mine, theirs = tensors_in(one), tensors_in(other)
    except ValueError as error:
        return {
            "same": False,
            "count": 0,
            "differing": 0,
            "tensors": [],
            "unreadable": visible(str(error)),
        }
    names = sorted(mine.keys() | theirs.keys(), key=lambda name: (name[:6] != "model/", name))
    differing: list[dict[str, Any]] = []
    for name in names:
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            differing.append({"name": name, "why": "only one run has it"})
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            why = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
            differing.append({"name": name, "why": why})
        elif a.sha256() != b.sha256():
            differing.append({"name": name, "shape": list(a.shape), **_distance(a, b)})
    most = differing[:MOST_TENSORS]
    return {
        "same": not differing,
        "count": len(names),
        "differing": len(differing),
        "tensors": most,
        "unreadable": "",
    }


def _distance(one: Tensor, other: Tensor) -> dict[str, Any]:
    """Returns the largest difference between two tensors, and how many values differ."""
    if max(one.size, other.size) > COMPARED_BYTES:
        return {}
    a, b = one.values(), other.values()
    if a is None:
        return {}
    gap = abs(a - b)
    largest = float(gap.max()) if gap.size else 0.0
    count = int((a != b).sum())
    return {"largest": largest if math.isfinite(largest) else None, "count": count, "of": a.size}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Returns the place of each tensor of a checkpoint; raises ValueError with the file that cannot
    be read. Pieces of shards count as one group.
    """
    pieces: dict[str, list[Piece]] = {}
    for file in sorted(folder.glob("[!.]*.safetensors")):
        group = file.name.partition(".")[0]
        try:
            for name, piece in _entries(file).items():
                pieces.setdefault(f"{group}/{name}", []).append(piece)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read ({brief(error)})") from None
    if not pieces:
        raise ValueError(f"{folder} holds no tensors")
    tensors = {}
    for name, members in pieces.items():
        members.sort(key=lambda piece: piece[0])
        _, rows, dtype, shape, _ = members[0]
        places = tuple(place for *_, place in members)
        tensors[name] = Tensor(dtype, (rows, *shape[1:]) if shape else (), places)
    return tensors


def _entries(file: Path) -> dict[str, Piece]:
    """Reads the header of a safetensors file: its length in eight bytes, then JSON."""
    with open_plain(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > HEADER_LIMIT:
            raise ValueError(f"a header of {length:,} bytes")
        header = json.loads(stream.read(length))
    rows = json.loads(header.pop("__metadata__", {}).get("rows", "{}"))
    entries = {}
    for name, entry in header.items():
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        first, of = rows.get(name, (0, shape[0] if shape else 1))
        entries[name] = first, of, entry["dtype"], shape, (file, 8 + length + start, end - start)
    return entries
