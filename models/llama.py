"""Reads and writes language models in the form of Hugging Face's transformers: a folder with a
config.json and safetensors files. A net of arch=gpt is a Llama, or with arch.qk_norm a Qwen3.

python -m models.llama CHECKPOINT FOLDER    writes a run's weights (its averages, if it has them)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from models.language.gpt import Shape
from utils.checkpoint import reader, tensorfiles
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import ConfigError, brief, exit_status, short
from utils.files import read_text, write_whole

# Our name of a tensor, and their names of its parts, which are stacked along the first dimension
BLOCK = {
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
# Options that our net does not have, and the value that turns each off
NEUTRAL = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None}
# Qwen3 norms queries and keys, then weighs each number and turns it by its position. Our net norms
# what is turned already, and has no weights. A rotation does not change a norm, so with weights of
# one both compute the same.
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
UNUSED = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight")  # older files hold these, too


def their_names(ours: str) -> list[str]:
    """Returns their names of the parts of one of our tensors."""
    if ours in AROUND:
        return [AROUND[ours]]
    _, layer, rest = ours.split(".", 2)
    return [f"model.layers.{layer}.{name}" for name in BLOCK[rest]]


def arch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys under `arch` of the net that a config.json describes."""
    # transformers 5; before, rope_theta and rope_scaling stood by themselves
    rope = config.get("rope_parameters") or {}
    width, heads = config["hidden_size"], config["num_attention_heads"]
    asked = {
        "rope_type": rope.get("rope_type", "default"),
        "head_dim": config.get("head_dim") or width // heads,
    } | {key: config.get(key, neutral) for key, neutral in NEUTRAL.items()}
    asked["use_sliding_window"] = bool(config.get("use_sliding_window", False))
    only = {"rope_type": "default", "head_dim": width // heads, "use_sliding_window": False}
    for key, value in (NEUTRAL | only).items():
        if asked[key] != value:
            raise ConfigError(
                f"config.json has {key}={brief(asked[key])}, which arch=gpt does not have; only"
                f" {value} can be read"
            )
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": width,
        "num_heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "mlp_width": config["intermediate_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "qk_norm": config.get("model_type") == "qwen3",
        "logit_cap": None,
    }


def config_of(shape: Shape, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """Returns the config.json that describes our net."""
    if shape.logit_cap:
        raise ConfigError(
            f"arch.logit_cap={short(shape.logit_cap)}: neither Llama nor Qwen3 caps logits; only a"
            " net with arch.logit_cap=null can be exported"
        )
    if shape.qk_norm:
        kind: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        kind |= {"use_sliding_window": False}
    else:
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {
        **kind,
        "torch_dtype": "float32",
        **NEUTRAL,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.keys,
        "head_dim": shape.hidden_size // shape.num_heads,
        "intermediate_size": shape.gated,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read(folder: Path, shape: Shape, vocab_size: int) -> dict[str, Tensor]:
    """Returns the weights in a folder under our names, for a net of this shape and vocabulary."""
    try:
        wanted = arch_of(json.loads(read_text(folder / "config.json")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = (
            str(error)
            if isinstance(error, ConfigError)
            else f"config.json cannot be read ({brief(error)}); give a folder with a Llama model"
        )
        raise ConfigError(f"init_from={folder}: {said}") from None
    ours = asdict(shape) | {"kv_heads": shape.keys, "mlp_width": shape.gated}
    if any(ours[key] != value for key, value in wanted.items()):
        keys = " ".join(
            f"arch.{key}={'null' if value is None else value}"
            for key, value in wanted.items()
            if ours[key] != value
        )
        raise ConfigError(f"init_from={folder}: holds another net; add {keys}")
    theirs: dict[str, Tensor] = {}
    for file in sorted(folder.glob("[!.]*.safetensors")):
        try:
            theirs |= tensorfiles.read(file)
        except Unreadable as error:
            raise ConfigError(f"init_from={folder}: {file.name} {error}") from None
    names = [f"layers.{layer}.{name}" for layer in range(shape.num_layers) for name in BLOCK]
    names += [name for name in AROUND if not (shape.tied and name == "lm_head.weight")]
    if missing := [name for ours_ in names for name in their_names(ours_) if name not in theirs]:
        raise ConfigError(
            f"init_from={folder}: {missing[0]} is in none of its safetensors files; give a whole"
            " folder"
        )
    norms = _qk_norms(shape) if shape.qk_norm else []
    for name in norms:
        if name in theirs and (theirs[name] != 1).any():
            raise ConfigError(
                f"init_from={folder}: {name} is not 1 everywhere; arch=gpt norms queries and keys"
                " without weights"
            )
    used = {*norms, *(part for name in names for part in their_names(name))}
    more = [name for name in theirs if name not in used and not UNUSED.fullmatch(name)]
    if more:
        raise ConfigError(
            f"init_from={folder}: {more[0]} has no place in arch=gpt; only Llama's nets, and"
            " Qwen3's with norms of weight 1, can be read"
        )
    if (known := len(theirs["model.embed_tokens.weight"])) != vocab_size:
        raise ConfigError(
            f"init_from={folder}: its vocabulary has {known} tokens, and the data's {vocab_size},"
            " special tokens included; tokenize the data with this net's own tokenizer.json"
        )
    return {name: torch.cat([theirs[part] for part in their_names(name)]) for name in names}


def _qk_norms(shape: Shape) -> list[str]:
    """The names of Qwen3's weights for normed queries and keys."""
    return [f"model.layers.{n}.{name}" for n in range(shape.num_layers) for name in QK_NORMS]


def write(folder: Path, weights: Mapping[str, Tensor], shape: Shape, seq_len: int) -> None:
    """Writes weights, given by our names, and the config.json of their net."""
    from safetensors.torch import save

    head = shape.hidden_size // shape.num_heads
    sizes = {
        "self_attn.qkv_proj.weight": [
            count * head for count in (shape.num_heads, shape.keys, shape.keys)
        ],
        "mlp.gate_up_proj.weight": [shape.gated, shape.gated],
    }
    norms = _qk_norms(shape) if shape.qk_norm else []
    theirs = {name: torch.ones(head) for name in norms}
    for name, tensor in weights.items():
        parts = tensor.split(sizes.get(name.split(".", 2)[-1], [len(tensor)]))
        theirs |= {
            part: rows.contiguous() for part, rows in zip(their_names(name), parts, strict=True)
        }
    config = config_of(shape, len(weights["embed_tokens.embedding_weight"]), seq_len)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.safetensors", save(theirs, {"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def export(*arguments: str) -> str:
    """Writes a run's weights, and returns a line that says so."""
    if len(arguments) != 2:
        raise ConfigError(
            "usage: python -m models.llama CHECKPOINT FOLDER    (a run folder or a step_* folder;"
            " where to write)"
        )
    checkpoint, folder = arguments
    groups, meta = reader.load(checkpoint, ["model", "ema"])
    config = OmegaConf.create(str(meta.get("config", "")))
    if OmegaConf.select(config, "arch._target_") != "models.language.gpt.GPT":
        raise ConfigError(
            f"{checkpoint}: is not a run of arch=gpt; give a run folder or one of its step_*"
            " folders"
        )
    shape = Shape(**{field.name: config.arch[field.name] for field in fields(Shape)})
    averaged = "ema" in groups
    weights = (
        {name.removeprefix("dense/"): t for name, t in groups["ema"].items() if name != "steps"}
        if averaged
        else groups["model"]
    )
    write(
        Path(folder),
        {name.removeprefix("model."): tensor for name, tensor in weights.items()},
        shape,
        config.data.seq_len,
    )
    return (
        f"{folder}: {'averaged ' * averaged}weights of step {meta['step']},"
        f" {sum(t.numel() for t in weights.values()):,} parameters"
    )


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    return exit_status(lambda: export(*arguments), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
