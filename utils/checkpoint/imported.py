"""Turns weights that torch has pickled, such as those of the published HRM and TRM, into a
checkpoint that everything here reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import tensorfiles
from utils.errors import ConfigError, brief

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "model"
COMPILED = "_orig_mod."  # what torch.compile puts before every name
# some published files hold the net without the loss around it, which names the net `model`
NET, INNER = "model.", "inner."
RESERVED = "__metadata__"  # a safetensors file has something else under this name


def import_weights(source: Path, folder: Path) -> str:
    """Writes the tensors of a pickled state dict into a folder; returns what was made in one line.

    torch reads tensors and plain containers out of such a file and nothing else: no code in it
    runs.
    """
    if not os.path.isfile(source):
        raise ConfigError(
            f"{source}: no such file; give a file that torch.save has written, such as step_50000"
        )
    if os.path.lexists(folder):
        raise ConfigError(f"{folder}: exists; give a folder that does not")
    read = _state_dict(source)
    weights = {_name(name): value.clone().contiguous() for name, value in read.items()}
    if len(weights) < len(read):
        raise ConfigError(
            f"{source}: has the same names with and without {COMPILED} or {NET}; keep one of each"
        )
    _write(weights, source, folder)
    values = sum(value.numel() for value in weights.values())
    return (
        f"{folder}: {len(weights)} tensors, {values:,} values; use it as checkpoint={folder} or"
        f" init_from={folder}"
    )


def _name(published: str) -> str:
    """The name of a tensor as a run here knows it."""
    name = published.removeprefix(COMPILED)
    return f"{NET}{name}" if name.startswith(INNER) else name


def _state_dict(source: Path) -> dict[str, Tensor]:
    """The file's content, if it is names with plain tensors."""
    import torch

    try:
        # about ways to pickle that torch does not use
        with warnings.catch_warnings(action="ignore"):
            read = torch.load(source, weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds, by what is wrong with the file
        named = re.search(r"GLOBAL (\S+)", str(error))  # what the file would have called
        reason = (
            f"it names {named[1]}" if named else f"torch cannot read it: {type(error).__name__}"
        )
        raise ConfigError(
            f"{source}: is no state dict of tensors ({reason}); such files alone are read"
        ) from None
    if not isinstance(read, dict) or not read:
        kind = "nothing" if isinstance(read, dict) else f"a {type(read).__name__}"
        raise ConfigError(f"{source}: holds {kind}; a state dict is read")
    for name, value in read.items():
        if unfit := _unfit(name, value):
            raise ConfigError(
                f"{source}: {brief(name)} {unfit}; a state dict of plain tensors is read, and"
                " nothing else"
            )
    return read


def _unfit(name: Any, value: Any) -> str:
    """Why a file of safetensors cannot hold a value; empty if it can."""
    import torch

    if not isinstance(name, str):
        return "is no name"
    if name.removeprefix(COMPILED) == RESERVED:
        return "is a name that safetensors files use themselves"
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}"
    if value.is_quantized:
        return f"is quantised ({value.dtype})"
    if value.layout != torch.strided or value.device.type != "cpu":
        return f"is a {value.layout} tensor on {value.device}"
    return ""


def _write(weights: dict[str, Tensor], source: Path, folder: Path) -> None:
    """The whole folder, or nothing."""
    from safetensors.torch import save_file

    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        file = aside / f"{GROUP}.safetensors"
        save_file(weights, file)
        tensorfiles.read(file)  # a dtype that can be written and not be read
        (aside / "meta.json").write_text(json.dumps({"groups": [GROUP]}) + "\n")
        aside.rename(folder)
    except Exception as error:  # safetensors refuses in many ways
        if isinstance(error, OSError) or "I/O error" in str(error):
            raise ConfigError(
                f"{folder}: cannot be written ({brief(error)}); give another folder"
            ) from None
        raise ConfigError(
            f"{source}: cannot be written as safetensors ({brief(error)}); convert it to plain"
            " tensors first"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
