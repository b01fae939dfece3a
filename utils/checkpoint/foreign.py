"""Reads the weights that HRM, TRM and their successors save with torch.save."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import format
from utils.errors import ConfigError, brief, short
from utils.files import open_plain, read_yaml

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("model", "model_state_dict", "state_dict")  # what holds them in a file with more
COMPILED, DDP = "_orig_mod.", "module."  # what wrappers of PyTorch put into every name
# some files hold the net without the loss around it, which names the net `model`
NET, INNER = "model.", "inner."
LAYER = re.compile(r"([HL])_level\.layers\.(\d+)\.")
CONFIG = "all_config.yaml"
WORD = re.compile(r"[\w.+-]{1,50}", re.ASCII)


class StandIn:
    """Takes the place of all that a file names but tensors and plain containers, such as a class of
    its repository: nothing that a file names is imported or called.
    """

    def __new__(cls, *_: Any) -> StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def read(source: Path, raw: bool) -> tuple[dict[str, Tensor], bool]:
    """Returns the weights, by the names that nets have here, and whether they are averages.

    If a file has averages beside the weights, they are taken, as its own repository evaluates with
    them; `raw`: the weights as they were trained.
    """
    content = _content(source)
    found = next((content[name] for name in WEIGHTS if isinstance(content.get(name), dict)), None)
    held = None if raw else next(filter(None, map(_averages, content, content.values())), None)
    if found is None and held is None:
        found = content
    weights = _by_our_names(source, found or {})
    if held is None:
        if not weights:
            raise ConfigError(f"{source}: holds no tensors; a state dict is read")
        return weights, False
    # buffers have none, and some keep their rate beside the tensors
    tensors = {name: value for name, value in held.items() if hasattr(value, "dtype")}
    averages = _by_our_names(source, tensors)
    if not averages or (weights and averages.keys() - weights.keys()):
        raise ConfigError(
            f"{source}: its averages have other names than its weights; import --raw takes the"
            " weights"
        )
    return weights | averages, True


def arch_beside(source: Path, weights: Mapping[str, Tensor]) -> str:
    """Returns the keys of the net, if the configuration of HRM or TRM lies beside their file: a net
    with other cycles or positions has the same weights, and computes something else. Without one,
    what the weights tell.

    They are quoted for a shell. Values other than numbers, words and lists of these are left out
    and named.
    """
    if not (source.parent / CONFIG).exists():
        return layout_of(weights)
    try:
        arch = read_yaml(source.parent / CONFIG)["arch"]
        net = arch.pop("name").partition("@")[0].rpartition(".")[2][:3]  # hrm.hrm_act_v1@Class
    except (ConfigError, LookupError, TypeError, AttributeError):
        return ""
    if net not in ("hrm", "trm"):
        return ""
    arch.pop("loss", None)  # around the net
    texts = {str(key): _plain(value) for key, value in arch.items()}
    keys = [key for key, text in texts.items() if WORD.fullmatch(key) and text]
    command = shlex.join([f"arch={net}", *(f"arch.{key}={texts[key]}" for key in keys)])
    unclear = shlex.join(short(key) for key in texts if key not in keys)
    return command + (f" (left out of {CONFIG}: {unclear})" if unclear else "")


def layout_of(weights: Mapping[str, Tensor]) -> str:
    """Returns the keys of the HRM or TRM that has such tensors, if any does."""
    shapes = {name.rpartition(INNER)[2]: tensor.shape for name, tensor in weights.items()}
    layers = {match[1]: int(match[2]) for match in map(LAYER.match, sorted(shapes)) if match}
    if "L" not in layers or "embed_tokens.embedding_weight" not in shapes:
        return ""
    keys = [f"arch={'hrm' if 'H' in layers else 'trm'}"]
    keys += [f"arch.hidden_size={shapes['embed_tokens.embedding_weight'][1]}"]
    keys += [f"arch.{level}_layers={1 + last}" for level, last in layers.items()]
    if any("mlp_t" in name for name in shapes):
        keys += ["arch.mlp_t=true", "arch.pos_encodings=none"]
    return " ".join(keys if "puzzle_emb.weights" in shapes else [*keys, "arch.puzzle_emb_ndim=0"])


def _plain(value: object) -> str:
    """Returns a number, a word or a list of them as the command line takes it; else nothing."""
    if isinstance(value, list):
        texts = [*map(_plain, value)]
        return f"[{','.join(texts)}]" if all(texts) else ""
    text = short(value)
    return text if WORD.fullmatch(text) else ""


def _averages(name: object, value: Any) -> Mapping[str, Any] | None:
    """Returns the averages in an entry of a file; None if it is something else."""
    if "ema" not in str(name).split("_") or not isinstance(value, dict | StandIn):
        return None
    return value.get("shadow", value) if isinstance(value, dict) else {"": value}


def _by_our_names(source: Path, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    weights = {}
    for name, tensor in published.items():
        plain = (
            isinstance(name, str)
            and isinstance(tensor, torch.Tensor)
            and tensor.layout == torch.strided
            and str(tensor.dtype).removeprefix("torch.") in format.KINDS
        )
        if not plain:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ConfigError(
                f"{source}: {brief(name)} is not a plain tensor ({brief(kind)}); give a state dict"
                f" of plain tensors, or a dictionary that has one as {', '.join(WEIGHTS)} or ema"
            )
        bare = name.replace(COMPILED, "").removeprefix(DDP)
        weights[f"{NET}{bare}" if bare.startswith(INNER) else bare] = tensor.clone().contiguous()
    if len(weights) < len(published):
        raise ConfigError(
            f"{source}: has the same names with and without {COMPILED}, {DDP} or {NET}; keep one of"
            " each"
        )
    return weights


def _content(source: Path) -> dict[Any, Any]:
    """Returns the dictionary that a file holds."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        open_plain(source).close()  # torch would wait for a pipe
        foreign = get_unsafe_globals_in_checkpoint(str(source))
        stand_ins: list[Any] = [(type(name, (StandIn,), {}), name) for name in foreign]
        # about ways to pickle that torch does not use
        with warnings.catch_warnings(action="ignore"), safe_globals(stand_ins):
            content = torch.load(source, weights_only=True, map_location="cpu")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({brief(error)})") from None
    except Exception as error:  # of many kinds, by what is wrong with the file
        named = re.search(r"GLOBAL (\S+)", str(error))  # what the file would have called
        reason = (
            f"it names {named[1]}" if named else f"torch cannot read it: {type(error).__name__}"
        )
        raise ConfigError(
            f"{source}: is not a state dict of tensors ({reason}); only such files can be read"
        ) from None
    if not isinstance(content, dict) or not content:
        kind = brief(type(content).__name__)
        raise ConfigError(f"{source}: is a {kind}, or empty; a state dict is read")
    return content
