"""Checkpoints as folders of safetensors files: whole or absent, and never unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from utils.errors import ConfigError

Group = dict[str, Tensor]
STEP_FOLDER = re.compile(r"step_\d+")


def save(directory: Path, step: int, tensors: Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> Path:
    """Write `step_<N>/` with one file per group, then point `latest` at it; a crash at any moment leaves the last one loadable.

    `tensors` is the model's, or several groups by name: `{"model": {...}, "ema": {...}}`. Only rank 0 calls this.
    """
    groups: dict[str, Any] = dict(tensors)
    if all(isinstance(value, Tensor) for value in groups.values()):
        groups = {"model": groups}
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step_{step}"
    aside, final = directory / f".{name}.writing", directory / name
    shutil.rmtree(aside, ignore_errors=True)  # what a crash left half written
    aside.mkdir()
    for group, members in groups.items():
        _write_tensors(aside / f"{group}.safetensors", members)
    _write_text(aside / "meta.json", json.dumps({**meta, "step": step, "groups": sorted(groups)}, indent=1) + "\n")
    _sync(aside)
    replaced = _replaced(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)  # a folder cannot be renamed over a full one; until the next line `load` looks here
    aside.rename(final)
    _sync(directory)
    _write_text(directory / "latest.writing", name + "\n")
    os.replace(directory / "latest.writing", directory / "latest")
    _sync(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def load(path: str | Path) -> tuple[dict[str, Group], dict[str, Any]]:
    """The groups and the meta of a step folder, a checkpoints or run folder (its latest), or a bare safetensors file."""
    path = Path(path)
    if not path.exists() and not _replaced(path).is_dir():
        raise ConfigError(f"checkpoint={path}: no such file or folder; give a run folder, a step_* folder or a .safetensors file")
    if path.is_file():
        return {"model": _read_tensors(path, path)}, {}
    folder = _step_folder(path)
    meta = _read_meta(folder, path)
    return {group: _read_tensors(folder / f"{group}.safetensors", path) for group in meta["groups"]}, meta


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Fill a module, all keys and all shapes; `what` names the source in the error."""
    own = module.state_dict()
    for key in own:
        if key not in tensors:
            raise ConfigError(f"checkpoint={what}: {key} is missing from it; use the arch and data of the run that wrote it")
        if own[key].shape != tensors[key].shape:
            there, here = tuple(tensors[key].shape), tuple(own[key].shape)
            raise ConfigError(
                f"checkpoint={what}: {key} has shape {there} there and {here} here; use the arch and data of the run that wrote it"
            )
    for key in tensors:
        if key not in own:
            raise ConfigError(f"checkpoint={what}: it holds {key}, which this model has not; use the arch of the run that wrote it")
    module.load_state_dict(dict(tensors))


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _step_folder(path: Path) -> Path:
    for candidate in (path, _replaced(path)):
        if (candidate / "meta.json").exists():
            return candidate
    for checkpoints in (path, path / "checkpoints"):
        if not (checkpoints / "latest").is_file():
            continue
        name = (checkpoints / "latest").read_text(errors="replace").strip()
        if not STEP_FOLDER.fullmatch(name):
            raise ConfigError(f"checkpoint={path}: {checkpoints / 'latest'} does not name a step; give one of the step_* folders beside it")
        folder = checkpoints / name
        if not folder.is_dir():
            folder = _replaced(folder)  # the writer died between moving the old one aside and the new one in
        if not folder.is_dir():
            raise ConfigError(f"checkpoint={path}: latest names {name}, which is not there; give one of the other step_* folders")
        return folder
    raise ConfigError(f"checkpoint={path}: holds no meta.json, latest or checkpoints/latest; give a run folder or a step_* folder")


def _read_meta(folder: Path, path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint={path}: {folder / 'meta.json'} cannot be read ({_brief(error)}); use another step_* folder"
        ) from None
    groups = meta.get("groups") if isinstance(meta, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, str) and "/" not in group for group in groups):
        raise ConfigError(f"checkpoint={path}: {folder / 'meta.json'} names no groups of tensors; use another step_* folder")
    return meta


def _read_tensors(file: Path, path: Path) -> Group:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with open(file, "rb") as stream:
            start = stream.read(4)
        if start == b"PK\x03\x04" or start[:1] == b"\x80":  # a zip as torch.save writes it, or a bare pickle
            raise ConfigError(
                f"checkpoint={path}: {file.name} is a pickle, which could run any code and is never read here; convert it once: "
                f"`safetensors.torch.save_file(torch.load({str(file)!r}, weights_only=True, map_location='cpu'), 'model.safetensors')`"
            )
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint={path}: {file.name} is damaged or cut short ({_brief(error)}); use another step_* folder") from None
    return {key.removeprefix("_orig_mod."): tensor for key, tensor in tensors.items()}  # torch.compile's prefix in published files


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    storages: set[int] = set()
    whole: Group = {}
    for key, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages and tensor.numel():
            tensor = tensor.clone()  # safetensors refuses tensors that share memory, as tied weights and views of a bucket do
        storages.add(storage)
        whole[key] = tensor
    save_file(whole, file, metadata={"format": "pt"})
    _sync(file)


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():  # some network disks cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
