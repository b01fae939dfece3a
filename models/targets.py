"""Nets that others are about: read from a run of this repository or from a folder with a Llama model, frozen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import llama
from models.frozen import Frozen, Tensors
from models.gpt import GPT
from utils.checkpoint import reader, tensorfiles
from utils.command.instantiate import make
from utils.errors import ConfigError, brief, said_of
from utils.files import read_text
from utils.spec import Spec

# A net without its weights, where they are, which files count if not all there, and how they are read
Found = tuple[nn.Module, Path, list[Path] | None, Callable[[Sequence[Path]], Tensors]]


def load(
    path: str | None, spec: Spec, forward_dtype: str, kinds: tuple[type[nn.Module], ...], which: str, key: str = "arch.target"
) -> Frozen:
    """The net at a path, as it computes for data of this kind; it must be one of these kinds, and `which` says so in words."""
    if path is None:
        raise ConfigError(f"{key}=null: names no net; give the folder of a run, or its arguments, as '{key}=\"experiment=tms_target\"'")
    net, folder, files, read = (_llama if (Path(path) / "config.json").is_file() else _run)(path, spec, forward_dtype, key)
    if not isinstance(net, kinds):
        raise ConfigError(f"{key}={path}: holds a {type(net).__name__}; {which}")
    try:
        return Frozen(net, str(folder), files, read)
    except ConfigError as error:
        raise ConfigError(f"{key}={error}") from None  # which begins with the folder


def _run(path: str, spec: Spec, forward_dtype: str, key: str) -> Found:
    with said_of(key):
        if not Path(path).exists():
            raise ConfigError(f"checkpoint={path}: no such file or folder; give the folder of a run, or the arguments that make one")
        if reader.is_weights(Path(path)):
            raise ConfigError(f"checkpoint={path}: a file of weights alone does not say of which net; give the folder of a run")
        arch = reader.config_in(path).get("arch", {})
        folder = reader.step_folder(Path(path))
    files = [file for name in ("model", "ema") if (file := folder / f"{name}.safetensors").is_file()]
    return _net(arch, path, spec, forward_dtype, key), folder, files, partial(_of_a_run, forward_dtype == "float64")


def _net(arch: Any, path: str, spec: Spec, forward_dtype: str, key: str) -> nn.Module:
    """Without its weights. What only saves memory in training it needs not, nor what another net is about."""
    if "target" in arch:
        raise ConfigError(f"{key}={path}: holds what is itself about another net, {arch['target']}; give that one")
    keys = {name: value for name, value in arch.items() if name != "loss"} | {"forward_dtype": forward_dtype}
    try:
        return make(keys | ({"recompute": False} if "recompute" in keys else {}), "arch", spec)
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: a net of {keys.get('_target_')} for {spec.name}: {error}") from None


def _of_a_run(wide: bool, files: Sequence[Path]) -> Tensors:
    """The net's weights, the averaged ones where the run averaged; those of a run in float64 as they are only for one in float64."""
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in tensorfiles.read(file).items():
            name = name.removeprefix("dense/")
            if name.startswith("model."):
                found[name.removeprefix("model.")] = tensor.float() if tensor.dtype == torch.float64 and not wide else tensor
    return found.items()


def _llama(path: str, spec: Spec, forward_dtype: str, key: str) -> Found:
    folder = Path(path)
    try:
        arch = llama.arch_of(json.loads(read_text(folder / "config.json")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error) if isinstance(error, ConfigError) else f"config.json cannot be read ({brief(error)}); give a whole folder"
        raise ConfigError(f"{key}={path}: {said}") from None
    net = _net({"_target_": "models.gpt.GPT", **arch}, path, spec, forward_dtype, key)
    assert isinstance(net, GPT)
    return net, folder, None, partial(_as_ours, folder, net)


def _as_ours(folder: Path, net: GPT, files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    dtype = next(net.parameters()).dtype
    try:
        weights = llama.read(folder, net.shape)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("init_from=")) from None
    return ((name, tensor.to(dtype)) for name, tensor in weights.items())
