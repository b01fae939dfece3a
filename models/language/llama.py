"""Reads and writes language models in the form of Hugging Face's transformers: a folder with a
config.json and safetensors files. A net of arch=gpt is a Llama, with arch.qkv_bias a Qwen2, or with
arch.qk_norm a Qwen3.

python -m models.language.llama CHECKPOINT FOLDER    writes a run's weights (its averages, if it
                                                     has them) and its tokenizer
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from contract import Spec
from models.language.gpt import Shape
from models.layers import Scaling
from utils.checkpoint import reader
from utils.command.instantiate import make
from utils.errors import ConfigError, brief, exit_status, said_of
from utils.files import OBJECT, read_json, write_whole

# Our name of a tensor, and their names of its parts, which are stacked along the first dimension
LAYER = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "self_attn.qkv_proj.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attn.o_proj.weight": ("self_attn.o_proj.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight": ("mlp.down_proj.weight",),
}
AROUND = {
    "embed_tokens.embedding_weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# What nets of other kinds add to a block: biases of queries, keys and values, and the weights of
# their norms
BIASES = "self_attn.qkv_proj.bias"
NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
MORE = {
    BIASES: ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    **{name: (name,) for name in NORMS},
}
# The kinds of nets that can be read, and what transformers takes for keys that a config.json lacks.
# Mistral without a sliding window is a Llama.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
# Options that our net does not have, and the value that turns each off
NEUTRAL: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
UNUSED = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight")  # older files hold these, too
ROPES = ("default", "llama3")
Describe = Callable[[Mapping[str, Any]], dict[str, Any]]  # the keys of arch of a config.json


def their_names(ours: str) -> list[str]:
    """Returns their names of the parts of one of our tensors."""
    if ours in AROUND:
        return [AROUND[ours]]
    _, layer, rest = ours.split(".", 2)
    return [f"model.layers.{layer}.{name}" for name in (LAYER | MORE)[rest]]


def names_of(shape: Shape) -> list[str]:
    """Returns our names of all tensors of a net."""
    inside = [*LAYER, *[BIASES] * shape.qkv_bias, *NORMS * shape.qk_weights]
    return [
        *(f"layers.{layer}.{name}" for layer in range(shape.num_layers) for name in inside),
        *(name for name in AROUND if not (shape.tied and name == "lm_head.weight")),
    ]


def arch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys under `arch` of the net that a config.json describes."""
    kind = config["model_type"]
    if kind not in KINDS:
        raise ConfigError(
            f"config.json has model_type={brief(kind)}, which arch=gpt is not; only"
            f" {', '.join(KINDS)} can be read"
        )
    # transformers leaves out keys that have their default, which differs by kind
    full = KINDS[kind] | dict(config)
    for key in COUNTS:
        if type(full[key]) is not int or full[key] < 1:
            raise ConfigError(
                f"config.json has {key}={brief(full[key])}; it must be a whole number of at least 1"
            )
    # options that our net lacks must be off, or its numbers would be wrong without an error
    rope = _rope_of(full)
    _check_neutral(kind, full, rope)
    # the same facts under our names
    width, heads = full["hidden_size"], full["num_attention_heads"]
    scaling = {name: rope[name] for name in Scaling.model_fields}
    return {
        "num_layers": full["num_hidden_layers"],
        "hidden_size": width,
        "num_heads": heads,
        "kv_heads": full.get("num_key_value_heads") or heads,
        "head_dim": full.get("head_dim") or width // heads,
        "mlp_width": full["intermediate_size"],
        "tied": bool(full.get("tie_word_embeddings", False)),
        "rms_norm_eps": float(full.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling if rope["rope_type"] == "llama3" else None,
        "qk_norm": kind == "qwen3",
        "qk_weights": kind == "qwen3",
        "qkv_bias": kind == "qwen2",
    }


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says of positions: by the names of transformers 5, or of 4."""
    # later entries win: defaults, then what version 4 wrote, then version 5
    before = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta") or 10000.0} | before
    rope |= config.get("rope_parameters") or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if rope["rope_type"] == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            rope[name] = float(rope[name])
    return dict.fromkeys(Scaling.model_fields) | rope


def _check_neutral(kind: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Refuses options that our net does not have."""
    # the first layer that is not plain attention, if any, and the share of each head that turns
    layers = [layer for layer in config.get("layer_types") or [] if layer != "full_attention"]
    turned = config.get("partial_rotary_factor", 1.0) * rope.get("partial_rotary_factor", 1.0)
    options = [(key, config.get(key, neutral), neutral) for key, neutral in NEUTRAL.items()]
    options += [
        ("use_sliding_window", bool(config.get("use_sliding_window", False)), False),
        ("layer_types", layers[0] if layers else "full_attention", "full_attention"),
        ("partial_rotary_factor", turned, 1.0),
    ]
    if kind == "mistral":
        options.append(("sliding_window", config["sliding_window"], None))
    # refuse the first that is on, by the name that config.json gives it
    for key, value, wanted in options:
        if value != wanted:
            raise ConfigError(
                f"config.json has {key}={brief(value)}, which arch=gpt does not have; only"
                f" {wanted} can be read"
            )
    if rope["rope_type"] not in ROPES:
        raise ConfigError(
            f"config.json has rope_type={brief(rope['rope_type'])}, which arch=gpt does not have;"
            f" only {' and '.join(ROPES)} can be read"
        )


def config_of(shape: Shape, vocab_size: int, seq_len: int, begin: int | None) -> dict[str, Any]:
    """Returns the config.json that describes our net."""
    if shape.qkv_bias and shape.qk_norm:
        raise ConfigError(
            "arch.qkv_bias=true: Qwen2 has such biases and Qwen3 norms queries and keys; a net"
            " with both cannot be exported"
        )
    # the family whose nets have the options of this one
    name = "Qwen3" if shape.qk_norm else "Qwen2" if shape.qkv_bias else "Llama"
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {"rope_type": "llama3", **shape.rope_scaling.model_dump()}
        rope["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        **({} if name == "Llama" else {"use_sliding_window": False}),
        "torch_dtype": "float32",
        **NEUTRAL,
        # sizes, and positions in the spelling of both versions
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.keys,
        "head_dim": shape.head_width,
        "intermediate_size": shape.gated,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope if shape.rope_scaling else None,  # read by transformers 4
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},  # and by 5
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "bos_token_id": begin,
        "eos_token_id": None,
    }


def read(folder: Path, shape: Shape, vocab_size: int) -> dict[str, Tensor]:
    """Returns the weights in a folder under our names, for a net of this shape and vocabulary."""
    _check_same_net(folder, shape)
    # all tensors of the folder, which large nets spread over several files
    theirs: dict[str, Tensor] = {}
    for file in sorted(folder.glob("[!.]*.safetensors")):
        with said_of("init_from"):
            theirs |= reader.load(file)[0]["model"]
    names = names_of(shape)
    # everything that our net needs must be there …
    if missing := [name for ours in names for name in their_names(ours) if name not in theirs]:
        what = f"{missing[0]} is in none of its safetensors files"
        raise _unfit(folder, what, "give a whole folder")
    # our norms have no weights, which are as good as weights of 1
    norms = _qk_norms(shape) if shape.qk_norm and not shape.qk_weights else []
    for name in norms:
        if name in theirs and (theirs[name] != 1).any():
            raise _unfit(folder, f"{name} is not 1 everywhere", "add arch.qk_weights=true")
    # … and nothing else, or the folder holds another net than its config.json says
    used = {*norms, *(part for name in names for part in their_names(name))}
    if more := [name for name in theirs if name not in used and not UNUSED.fullmatch(name)]:
        remedy = "give the folder of a net that has no more than its config.json says"
        raise _unfit(folder, f"{more[0]} has no place in arch=gpt", remedy)
    if (known := len(theirs["model.embed_tokens.weight"])) != vocab_size:
        what = f"its vocabulary has {known} tokens, and the data's {vocab_size}, special tokens"
        remedy = "tokenize the data with this net's own tokenizer.json"
        raise _unfit(folder, f"{what} included", remedy)
    return {name: torch.cat([theirs[part] for part in their_names(name)]) for name in names}


def _unfit(folder: Path, what: str, remedy: str = "") -> ConfigError:
    """An error about a folder of Hugging Face; `said_of` is the key in the message, if it is
    another one."""
    return ConfigError(what, key="init_from", value=folder, remedy=remedy)


def arch_in(folder: Path, others: Mapping[str, Describe] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the keys under `arch` of the net in a folder; `others` describe other kinds."""
    remedy = "give a folder with a model of transformers"
    try:
        config = read_json(folder / "config.json", OBJECT, remedy, "config.json")
        return others.get(config["model_type"], arch_of)(config)
    except ConfigError as error:
        raise _unfit(folder, str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unfit(folder, f"config.json cannot be read ({brief(error)})", remedy) from None


def _check_same_net(folder: Path, shape: Shape) -> None:
    """Refuses a folder with a net of another shape."""
    wanted = arch_in(folder)
    ours = shape.model_dump() | {
        "kv_heads": shape.keys,
        "mlp_width": shape.gated,
        "head_dim": shape.head_width,
    }
    if shape.qk_norm:
        del wanted["qk_weights"]  # weights of 1 need not be there
    if other := {key: value for key, value in wanted.items() if ours[key] != value}:
        keys = " ".join(f"arch.{key}={_as_argument(value)}" for key, value in other.items())
        raise _unfit(folder, "holds another net", f"add {keys}")


def _as_argument(value: Any) -> str:
    if isinstance(value, dict):
        return "'{" + ", ".join(f"{key}: {number}" for key, number in value.items()) + "}'"
    return "null" if value is None else str(value)


def _qk_norms(shape: Shape) -> list[str]:
    """The names of Qwen3's weights for normed queries and keys."""
    return [f"model.layers.{n}.{name}" for n in range(shape.num_layers) for name in NORMS]


def write(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: Shape,
    seq_len: int,
    begin: int | None = None,
) -> None:
    """Writes weights, given by our names, and the config.json of their net."""
    from safetensors.torch import save

    head = shape.head_width
    heads = [count * head for count in (shape.num_heads, shape.keys, shape.keys)]
    # ours are fused, theirs are not: where to cut
    sizes = {
        "self_attn.qkv_proj.weight": heads,
        BIASES: heads,
        "mlp.gate_up_proj.weight": [shape.gated, shape.gated],
    }
    # ours turn first and have no weights: a rotation does not change a norm, so with weights of 1
    # Qwen3's compute the same
    norms = _qk_norms(shape) if shape.qk_norm and not shape.qk_weights else []
    theirs = {name: torch.ones(head) for name in norms}
    for name, tensor in weights.items():
        pieces = tensor.split(sizes.get(name.split(".", 2)[-1], [len(tensor)]))
        theirs |= {
            part: rows.contiguous() for part, rows in zip(their_names(name), pieces, strict=True)
        }
    config = config_of(shape, len(weights["embed_tokens.embedding_weight"]), seq_len, begin)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.safetensors", save(theirs, {"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def export(*arguments: str) -> str:
    """Writes a run's weights, and returns a line about it."""
    if len(arguments) != 2:
        raise ConfigError(
            "usage: python -m models.language.llama CHECKPOINT FOLDER    (a run folder or a step_*"
            " folder; where to write)"
        )
    # only a run of arch=gpt has a counterpart in transformers
    checkpoint, folder = arguments
    groups, meta = reader.load(checkpoint, ["model", "ema"])
    config = OmegaConf.create(meta.get("config", {}))
    if OmegaConf.select(config, "arch._target_") != "models.language.gpt.GPT":
        raise ConfigError(
            f"{checkpoint}: is not a run of arch=gpt; give a run folder or one of its step_*"
            " folders"
        )
    arch: Any = OmegaConf.to_container(config.arch)
    shape = Shape(**{name: arch[name] for name in Shape.model_fields})
    # averages are what evaluations measured
    averaged = "ema" in groups
    weights = reader.averages_in(groups["ema"]) if averaged else groups["model"]
    spec, problem = _data_of(checkpoint)
    write(
        Path(folder),
        {name.removeprefix("model."): tensor for name, tensor in weights.items()},
        shape,
        config.data.seq_len,
        getattr(spec, "begin_token", None),
    )
    if not problem:
        _write_tokenizer(Path(folder), spec, config.data.seq_len)
    return (
        f"{folder}: {'averaged ' * averaged}weights of step {meta['step']},"
        f" {sum(t.numel() for t in weights.values()):,} parameters,"
        f" {problem or 'with their tokenizer'}"
    )


def _data_of(checkpoint: str) -> tuple[Spec, str]:
    """Opens a run's data for its tokenizer. Without one, also returns the reason."""
    try:
        # This command alone needs data, which models may not import: training hands a net no more
        # than its `Spec`. So it makes them by name, as a configuration does.
        source = make({"_target_": "data.source.source_of"}, "data", reader.config_in(checkpoint))
    except ConfigError as error:
        return Spec(), f"without a tokenizer ({error})"
    spec: Spec = source.spec
    known = getattr(spec, "tokenizer", None) is not None
    return spec, "" if known else f"without a tokenizer ({spec.name} names none)"


def _write_tokenizer(folder: Path, spec: Spec, seq_len: int) -> None:
    # the begin token is known by its id here, and by its text in transformers
    content = spec.tokenizer.published()
    special = {token["id"]: token["content"] for token in json.loads(content)["added_tokens"]}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        "bos_token": special.get(spec.begin_token),
    }
    write_whole(folder / "tokenizer.json", content)
    write_whole(folder / "tokenizer_config.json", json.dumps(about, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    return exit_status(lambda: export(*arguments), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
