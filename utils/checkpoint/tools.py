"""Shows, verifies, compares and exports checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import contents, reader, tensorfiles
from utils.checkpoint.contents import Stored
from utils.checkpoint.meta import config_of
from utils.checkpoint.slices import Slice
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import ConfigError, brief, visible
from utils.files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from utils.averages import Decay

SAME = "the same"
MOST_TENSORS = 30  # that differ and are named
BLOCK_BYTES = 1 << 26  # of a tensor that are compared at once
AVERAGE, ROWS = "dense/", "rows/"  # of weights, and of tables, which are brought up to date


def show(path: str) -> str:
    """A checkpoint's step, what has written it, and every tensor with its type, shape, size and
    files.
    """
    checkpoint = reader.open_checkpoint(path)
    meta, tensors = checkpoint.meta, _tensors(checkpoint.folder)
    files = sorted({file.name for stored in tensors.values() for file, _ in stored.pieces})
    total = sum(stored.size for stored in tensors.values())
    written = [f"{meta['ranks']} rank{'s' * (meta['ranks'] > 1)}"] if "ranks" in meta else []
    written += [f"PyTorch {meta['torch']}"] if "torch" in meta else []
    written += [" ".join(meta["code"].split())] if meta.get("code") else []
    lines = [
        f"{visible(str(checkpoint.folder))}: step {meta.get('step', 'unknown')},"
        f" {len(tensors)} tensors, {total:,} bytes in {len(files)} files",
        *([f"written by {', '.join(written)}"] if written else []),
        *_table({name: _row(stored) for name, stored in tensors.items()}),
    ]
    return "\n".join(lines)


def verify(path: str) -> str:
    """One line if every byte is as it was written; a ConfigError says which file is not."""

    def read(folder: Path) -> str:
        if problem := reader.verify(folder):
            raise ConfigError(
                f"checkpoint={path}: {folder.name} is damaged ({problem}); {reader.ANOTHER}"
            )
        size = sum(file.stat().st_size for file in folder.iterdir())
        return f"{visible(str(folder))}: whole, {len([*folder.iterdir()])} files, {size:,} bytes"

    return reader.reading(Path(path), read)


def diff(one: str, other: str) -> str:
    """The first tensors that differ, and by how much."""
    for path in (one, other):
        if reader.is_weights(Path(path)):
            raise ConfigError(f"{path}: a file of weights alone; give a run or a step_* folder")
    comparison = compare(Path(one), Path(other))
    if comparison["unreadable"]:
        raise ConfigError(comparison["unreadable"])
    if comparison["same"]:
        return f"{SAME}: {comparison['count']} tensors, to the bit"
    lines = [f"{comparison['differing']} of {comparison['count']} tensors differ"]
    for tensor in comparison["tensors"]:
        lines.append(f"{visible(tensor['name'])}: {_difference(tensor)}")
    if comparison["differing"] > len(comparison["tensors"]):
        lines.append("…")
    return "\n".join(lines)


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Compares two checkpoints tensor by tensor, those of the model first.

    `tensors` describes the first that differ. Checkpoints that cannot be read are not the same;
    `unreadable` is the reason.
    """
    differing: list[dict[str, Any]] = []
    names: list[str] = []
    unreadable = ""
    try:
        mine, theirs = _tensors(one), _tensors(other)
        names = sorted(mine | theirs, key=lambda name: (not name.startswith("model/"), name))
        for name in names:
            if name not in mine or name not in theirs:
                differing.append({"name": name, "why": "only one run has it"})
            elif found := _compare(mine[name], theirs[name]):
                differing.append({"name": name, **found})
    except (ConfigError, OSError) as error:
        unreadable = visible(brief(error))
    return {
        "same": not differing and not unreadable,
        "count": len(names),
        "differing": len(differing),
        "tensors": differing[:MOST_TENSORS],
        "unreadable": unreadable,
    }


def _tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, the state of shards included, by `group/name`."""
    checkpoint = reader.open_checkpoint(path)
    try:
        shards = contents.find_tensors(contents.pieces_in(checkpoint.folder))
    except Unreadable as error:
        raise ConfigError(f"{checkpoint.folder / error.file} {error}") from None
    groups = {**checkpoint.groups, "shards": shards}
    return {
        f"{group}/{name}": stored
        for group, members in groups.items()
        for name, stored in members.items()
    }


def _compare(one: Stored, other: Stored) -> dict[str, Any]:
    """Returns how two tensors differ; empty if all their bits are equal."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return {
            "why": f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}",
        }
    rows = one.shape[0] if one.shape else 1
    at_once = max(1, BLOCK_BYTES * rows // max(1, one.size))
    count, largest, same_bits = 0, 0.0, True
    for first in range(0, rows, at_once):
        stop = min(rows, first + at_once)
        mine, theirs = one.read(first, stop), other.read(first, stop)
        if not torch.equal(_bits(mine), _bits(theirs)):
            same_bits = False
            mine, theirs = mine.double(), theirs.double()
            gaps = (mine - theirs)[mine != theirs].abs().nan_to_num(nan=math.inf)
            count += len(gaps)
            largest = max([largest, *gaps.topk(min(1, len(gaps))).values.tolist()])
    if same_bits:
        return {}
    return {
        "shape": list(one.shape),
        "largest": largest if math.isfinite(largest) else None,
        "count": count,
        "of": math.prod(one.shape),
    }


def _bits(tensor: Tensor) -> Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def export(path: str, folder: Path) -> str:
    """Writes the weights, or their averages if the run averaged, as one file that programs of the
    Hugging Face ecosystem read; returns what was made in one line.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: exists; give a folder that does not")
    groups, meta = reader.load(path, ["model", "ema"])
    if "model" not in groups:
        raise ConfigError(f"checkpoint={path}: holds no model; {reader.ANOTHER}")
    weights, average = dict(groups["model"]), groups.get("ema", {})
    for name, tensor in average.items():
        if name.startswith(AVERAGE):
            weights[name.removeprefix(AVERAGE)] = tensor
        elif name.startswith(ROWS):
            table = name.removeprefix(ROWS)
            weights[f"{table}.weights"] = _catch_up_rows(
                tensor,
                weights[f"{table}.weights"],
                _decay(meta).between(average[f"seen/{table}"], average["steps"]),
            )
    try:
        folder.mkdir(parents=True)
        tensorfiles.write(
            folder / "model.safetensors", {name: Slice.whole(t) for name, t in weights.items()}
        )
        origin = {key: meta[key] for key in ("step", "config", "code") if key in meta}
        write_whole(folder / "origin.json", json.dumps(origin, indent=1) + "\n")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"{folder}: cannot be written ({brief(error)}); give another folder"
        ) from None
    values = sum(tensor.numel() for tensor in weights.values())
    return (
        f"{folder}: {'averaged ' * bool(average)}weights of step {meta.get('step', 'unknown')},"
        f" {len(weights)} tensors, {values:,} values"
    )


def _catch_up_rows(rows: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """Averages of rows up to now: weights have stood still since they changed."""
    return rows + (weights.float() - rows) * (1 - kept).float()[:, None]


def _decay(meta: dict[str, Any]) -> Decay:
    from utils.averages import Decay

    config = config_of(meta["config"])
    return Decay(float(config["ema_rate"]), bool(config.get("ema_warmup")))


def _row(stored: Stored) -> tuple[str, ...]:
    places = ", ".join(file.name for file, _ in stored.pieces[:3])
    more = ", …" * (len(stored.pieces) > 3)
    return stored.dtype, str(list(stored.shape)), f"{stored.size:,}", places + more


def _table(rows: dict[str, tuple[str, ...]]) -> list[str]:
    """Lines with columns of equal width; sizes stand right."""
    cells = [tuple(map(visible, (name, *row))) for name, row in sorted(rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if column == 3 else text.ljust(width)
            for column, (text, width) in enumerate(zip(cell, widths, strict=True))
        ).rstrip()
        for cell in cells
    ]


def _difference(tensor: dict[str, Any]) -> str:
    if "why" in tensor:
        return str(tensor["why"])
    largest = "beyond all numbers" if tensor["largest"] is None else f"{tensor['largest']:.3g}"
    return f"{tensor['count']:,} of {tensor['of']:,} values, by at most {largest}"
