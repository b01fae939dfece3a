"""Trained, frozen nets that other nets study: read from a run, or from a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contract import Spec
from models.frozen import Frozen, Tensors
from models.language import gpt2, llama
from models.language.causal_lm import draw_tokens
from models.language.gpt import GPT
from models.language.gpt2 import GPT2
from utils.checkpoint import reader
from utils.command.instantiate import make
from utils.errors import ConfigError, said_of

__all__ = ["GPT", "GPT2", "draw_tokens", "load_frozen"]

# a net without its weights; their folder, their files (None: all in the folder), and their reader
Found = tuple[nn.Module, Path, list[Path] | None, Callable[[Sequence[Path]], Tensors]]


def load_frozen(
    path: str | None,
    spec: Spec,
    forward_dtype: str,
    kinds: tuple[type[nn.Module], ...],
    which: str,
    key: str = "arch.target",
) -> Frozen:
    """Loads the net at a path, for data like `spec`.

    It must be one of `kinds`, which `which` names for the error message; `key` names the path.
    """
    if path is None:
        raise ConfigError(
            f"{key}=null: must name a net; give the folder of a run, or its arguments, as in"
            f" '{key}=\"experiment=tms_target\"'"
        )
    with said_of(key):
        # a folder with a config.json is one of Hugging Face, any other a run's
        find = _published if (Path(path) / "config.json").is_file() else _run
        net, folder, files, read = find(key, path, spec, forward_dtype)
        if not isinstance(net, kinds):
            raise ConfigError(f"{key}={path}: holds a {type(net).__name__}; {which}")
        return Frozen(net, str(folder), files, read)


def _run(key: str, path: str, spec: Spec, forward_dtype: str) -> Found:
    if not Path(path).exists():
        raise ConfigError(
            f"{key}={path}: no such file or folder; give the folder of a run, or the arguments"
            " that make one"
        )
    if reader.is_weights(Path(path)):
        raise ConfigError(
            f"{key}={path}: a file of weights does not say which net they belong to; give the"
            " folder of a run"
        )
    # the run's configuration says which net the weights belong to
    arch = reader.config_in(path).get("arch", {})
    checkpoint = reader.open_checkpoint(path, ["model", "ema"], hashed=True)
    folder, files = checkpoint.path, sorted({each.file for each in checkpoint.tensors.values()})
    net = _net(key, arch, path, spec, forward_dtype)
    return net, folder, files, partial(_weights_of_run, forward_dtype == "float64")


def _net(key: str, arch: Any, path: str, spec: Spec, forward_dtype: str) -> nn.Module:
    """Builds the net without its weights, and without what only training needs."""
    if "target" in arch:
        raise ConfigError(
            f"{key}={path}: is itself about another net, {arch['target']}; give that one"
        )
    keys = {name: value for name, value in arch.items() if name != "loss"}
    keys["forward_dtype"] = forward_dtype
    if "recompute" in keys:  # dropout is off, as in an evaluation
        keys["recompute"] = False
    try:
        return make(keys, "arch", spec)
    except ConfigError as error:
        raise ConfigError(
            f"{key}={path}: a net of {keys.get('_target_')} for {spec.name}: {error}"
        ) from None


def _weights_of_run(wide: bool, files: Sequence[Path]) -> Tensors:
    """Yields a net's weights, averaged if the run averaged; float64 becomes float32, if not
    `wide`.
    """
    groups = reader.open_checkpoint(files[0].parent, ["model", "ema"]).groups
    weights = {**groups.get("model", {}), **reader.averages_in(groups.get("ema", {}))}
    for name, stored in weights.items():
        if name.startswith("model."):
            tensor = stored.read()
            narrow = tensor.dtype == torch.float64 and not wide
            yield name.removeprefix("model."), tensor.float() if narrow else tensor


def _published(key: str, path: str, spec: Spec, forward_dtype: str) -> Found:
    folder = Path(path)
    arch = llama.arch_in(folder, {"gpt2": gpt2.arch_of})
    # a Llama's keys: as it is read and not trained, it needs neither dropout nor recomputation
    if "_target_" not in arch:
        arch |= {"_target_": "models.language.gpt.GPT", "recompute": False, "dropout": 0.0}
    net = _net(key, arch, path, spec, forward_dtype)
    assert isinstance(net, GPT | GPT2)
    return net, folder, None, partial(_as_ours, folder, net)


def _as_ours(folder: Path, net: GPT | GPT2, files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    dtype = next(net.parameters()).dtype
    if isinstance(net, GPT2):
        weights = gpt2.as_ours(reader.load(file)[0]["model"] for file in files)
    else:
        weights = llama.read(folder, net.shape, len(net.embed_tokens.embedding_weight))
    return ((name, tensor.to(dtype)) for name, tensor in weights.items())
