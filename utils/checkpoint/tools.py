"""Shows, verifies, compares, exports and imports checkpoints."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import foreign, format, reader
from utils.checkpoint.format import MANIFEST, META, SUFFIX, Stored
from utils.errors import ConfigError, brief, visible

if TYPE_CHECKING:
    from torch import Tensor

SAME = "the same"
MOST_TENSORS = 30  # that differ and are named
# the metadata that tells where weights are from and how good they are
KEPT = ("step", "results", "config", "data", "code", "torch", "device", "ranks")
AT_ONCE = 1 << 24  # values of a tensor that are compared at once


def show(path: str) -> str:
    """A checkpoint's step, what has written it, and every tensor with its type, shape, size and
    file.
    """
    checkpoint = reader.open_checkpoint(path)
    meta, tensors = checkpoint.meta, checkpoint.tensors
    total = sum(stored.size for stored in tensors.values())
    written = [f"{meta['ranks']} rank{'s' * (meta['ranks'] > 1)}"] if "ranks" in meta else []
    written += [f"PyTorch {meta['torch']}"] if "torch" in meta else []
    written += [" ".join(meta["code"].split())] if meta.get("code") else []
    lines = [
        f"{visible(str(checkpoint.path))}: step {meta.get('step', 'unknown')},"
        f" {len(tensors)} tensors, {total:,} bytes in {len(checkpoint.groups)} files",
        *([f"written by {', '.join(written)}"] if written else []),
        *_table({name: _row(stored) for name, stored in tensors.items()}),
    ]
    return "\n".join(lines)


def verify(path: str) -> str:
    """One line if every byte is as it was written; a ConfigError says which file is not."""
    if reader.is_weights(Path(path)):
        raise ConfigError(
            f"{path}: a file alone; give a folder, whose manifest says what was written"
        )
    folder = reader.open_checkpoint(path, hashed=True).path
    names = {MANIFEST, *format.read_manifest(folder)}
    size = sum((folder / name).stat().st_size for name in names)
    line = f"{visible(str(folder))}: whole, {len(names)} files, {size:,} bytes"
    if others := sorted({*os.listdir(folder)} - names):
        return f"{line}; not checked, as {MANIFEST} does not name them: {brief(', '.join(others))}"
    return line


def diff(one: str, other: str) -> str:
    """The first tensors that differ, and by how much."""
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
        first, second = (reader.open_checkpoint(path).tensors for path in (one, other))
        names = sorted(first | second, key=lambda name: (not name.startswith("model/"), name))
        for name in names:
            if name not in first or name not in second:
                differing.append({"name": name, "why": "only one run has it"})
            elif found := _compare(first[name], second[name]):
                differing.append({"name": name, **found})
    except (ValueError, OSError) as error:
        unreadable = visible(brief(error))
    return {
        "same": not differing and not unreadable,
        "count": len(names),
        "differing": len(differing),
        "tensors": differing[:MOST_TENSORS],
        "unreadable": unreadable,
    }


def export(path: str, folder: Path) -> str:
    """Writes a checkpoint of the weights alone, or of their averages if the run averaged, in one
    file that programs of the Hugging Face ecosystem read; returns a line about it.
    """
    _refuse_existing(folder)
    groups, meta = reader.load(path, ["model", "ema"])
    if "model" not in groups:
        raise ConfigError("holds no model", key="checkpoint", value=path, remedy=reader.ANOTHER)
    weights, average = groups["model"], groups.get("ema", {})
    weights |= reader.averages_in(average)
    kept = {key: meta[key] for key in KEPT if key in meta}
    if average:  # these are the weights now
        kept["config"] = {**kept["config"], "ema": False}
    values = _write_folder(folder, weights, {META: json.dumps(kept, indent=1) + "\n"})
    return (
        f"{folder}: {'averaged ' * bool(average)}weights of step {meta.get('step', 'unknown')},"
        f" {len(weights)} tensors, {values:,} values"
    )


def import_weights(source: Path, folder: Path, raw: bool = False) -> str:
    """Turns weights that torch has pickled, such as those of the published HRM and TRM, into a
    checkpoint; returns a line about it.
    """
    _refuse_existing(folder)
    if source.suffix == SUFFIX:
        reader.open_checkpoint(source)  # refuses a damaged one
        raise ConfigError(f"{source}: is safetensors already; use it as checkpoint or init_from")
    weights, averaged = foreign.read(source, raw)
    values = _write_folder(folder, weights, {META: "{}\n"})
    arch = foreign.arch_beside(source, weights)
    evaluated, begun = (shlex.quote(f"{key}={folder}") for key in ("checkpoint", "init_from"))
    return (
        f"{folder}: {'averaged ' * averaged}weights, {len(weights)} tensors, {values:,} values; use"
        f" it as {evaluated} or {begun}{arch and f' with {arch}'}"
    )


def _compare(one: Stored, other: Stored) -> dict[str, Any]:
    """Returns how two tensors differ; empty if all their bits are equal."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return {"why": f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"}
    here, there = one.read(), other.read()
    if format.content_of(here) == format.content_of(there):
        return {}
    count, largest = 0, 0.0
    for some, others in zip(
        here.view(-1).split(AT_ONCE), there.view(-1).split(AT_ONCE), strict=True
    ):
        some, others = some.double(), others.double()
        gaps = (some - others)[some != others].abs().nan_to_num(nan=math.inf)
        count += len(gaps)
        largest = max([largest, *gaps.topk(min(1, len(gaps))).values.tolist()])
    return {
        "shape": list(one.shape),
        "largest": largest if math.isfinite(largest) else None,
        "count": count,
        "of": math.prod(one.shape),
    }


def _difference(tensor: dict[str, Any]) -> str:
    if "why" in tensor:
        return str(tensor["why"])
    largest = "beyond all numbers" if tensor["largest"] is None else f"{tensor['largest']:.3g}"
    return f"{tensor['count']:,} of {tensor['of']:,} values, by at most {largest}"


def _row(stored: Stored) -> tuple[str, ...]:
    return stored.dtype, str(list(stored.shape)), f"{stored.size:,}", stored.file.name


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


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: exists; give a folder that does not")


def _write_folder(folder: Path, weights: Mapping[str, Tensor], texts: Mapping[str, str]) -> int:
    """Writes weights and texts into a new folder; returns how many values the weights have."""
    files: dict[str, dict[str, Any]] = {}
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            files[name] = format.write_text(folder / name, text)
        ordered = format.in_file_order(weights)
        file = f"model{SUFFIX}"
        files[file] = format.write(folder / file, ordered, iter(ordered.values()))
        format.write_manifest(folder, files)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"{folder}: cannot be written ({brief(error)}); give another folder"
        ) from None
    return sum(tensor.numel() for tensor in weights.values())
