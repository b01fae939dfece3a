"""Weights of the published HRM and TRM, which torch has pickled, as a checkpoint that everything here reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path

from utils.errors import ConfigError, brief

GROUP = "model"
COMPILED = "_orig_mod."  # what torch.compile puts before every name


def import_weights(source: Path, folder: Path) -> str:
    """Write what a pickled state dict holds into a folder; returns what was made, in one line.

    torch reads tensors and plain containers out of such a file and nothing else: no code in it runs.
    """
    import torch
    from safetensors.torch import save_file

    if not os.path.isfile(source):
        raise ConfigError(f"{source}: no such file; give a file that torch.save has written, such as step_50000")
    if os.path.exists(folder):
        raise ConfigError(f"{folder}: exists; give a folder that does not")
    try:
        with warnings.catch_warnings(action="ignore"):  # about ways to pickle that torch does not use
            read = torch.load(source, weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds, by what is wrong with the file
        named = re.search(r"GLOBAL (\S+)", str(error))  # what the file would have called
        reason = f"it names {named[1]}" if named else f"torch cannot read it: {type(error).__name__}"
        raise ConfigError(f"{source}: is no state dict of tensors ({reason}); such files alone are read") from None
    if not isinstance(read, dict) or not read:
        raise ConfigError(f"{source}: holds {'nothing' if isinstance(read, dict) else f'a {type(read).__name__}'}; a state dict is read")
    for name, value in read.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided):
            raise ConfigError(
                f"{source}: {brief(name)} is a {type(value).__name__}; a state dict of plain tensors is read, and nothing else"
            )
    weights = {name.removeprefix(COMPILED): value.clone().contiguous() for name, value in read.items()}
    if len(weights) < len(read):
        raise ConfigError(f"{source}: has the same names with and without {COMPILED}; keep one of each")
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        save_file(weights, aside / f"{GROUP}.safetensors")
        (aside / "meta.json").write_text(json.dumps({"groups": [GROUP]}) + "\n")
        aside.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({brief(error)}); give another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    values = sum(value.numel() for value in weights.values())
    return f"{folder}: {len(weights)} tensors, {values:,} values; use it as checkpoint={folder} or init_from={folder}"
