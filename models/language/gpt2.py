"""GPT-2, as Hugging Face's transformers publishes it: a net to study, not to train."""

# B batch, L positions, D width

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from contract import Spec
from models.layers import (
    Attention,
    Embedding,
    ForwardDtype,
    Layers,
    Linear,
    Width,
    parse_dtype,
    widen,
)
from utils.command.marks import Fraction, Keys
from utils.errors import ConfigError, brief

# Their names of the modules of a block, and ours, which are those of arch=gpt
BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
AROUND = {
    "wte.weight": "embed_tokens.embedding_weight",
    "wpe.weight": "embed_positions.embedding_weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
}
# older files hold these, too: masks, and the embedding again
UNUSED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")
IN_BLOCK = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")
# options that our net does not have, and the value that turns each off
NEUTRAL = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


class Shape(Keys):
    """The keys of a config.json that matter, and what transformers takes if it lacks one."""

    vocab_size: PositiveInt = 50257
    n_positions: PositiveInt = 1024
    n_embd: Width = 768
    n_layer: Layers = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    layer_norm_epsilon: Fraction = 1e-5
    forward_dtype: ForwardDtype = "float32"


class LayerNorm(nn.LayerNorm):
    """Casts its weights where they are used."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class MLP(nn.Module):
    """Two linear maps, with the tanh form of GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = Linear(width, hidden, bias=True)
        self.down_proj = Linear(hidden, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP; each reads a norm of the stream, and adds to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, eps = shape.n_embd, shape.layer_norm_epsilon
        self.attn_norm, self.mlp_norm = LayerNorm(width, eps), LayerNorm(width, eps)
        self.self_attn = Attention(width, shape.n_head, bias=True, bias_out=True)
        self.mlp = MLP(width, shape.n_inner or 4 * width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.self_attn(self.attn_norm(x_BLD), None, causal=True)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class GPT2(nn.Module):
    """Turns tokens into hidden states, from which `logits` makes scores of the next token."""

    def __init__(self, spec: Spec, keys: Shape) -> None:
        super().__init__()
        # published weights have fixed sizes, which the data must fit
        if keys.vocab_size != spec.vocab_size:
            raise ConfigError(
                f"its vocabulary has {keys.vocab_size} tokens, and the data's {spec.vocab_size};"
                " tokenize the data with this net's own tokenizer.json"
            )
        if spec.seq_len > keys.n_positions:
            raise ConfigError(f"data.seq_len={spec.seq_len}: it has {keys.n_positions} positions")
        if getattr(spec, "most_documents", 0):
            raise ConfigError("data.documents=true: its positions count from the row's beginning")
        self.dtype, width = parse_dtype(keys.forward_dtype), keys.n_embd
        self.embed_tokens = Embedding(keys.vocab_size, width, 0.02)
        self.embed_positions = Embedding(keys.n_positions, width, 0.01)
        self.layers = nn.ModuleList(Block(keys) for _ in range(keys.n_layer))
        self.norm = LayerNorm(width, keys.layer_norm_epsilon)

    def forward(self, tokens_BL: Tensor, documents_BL: None = None) -> Tensor:
        positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(
            tokens_BL
        )
        # learned positions are added once, at the bottom; later nets rotate instead
        x_BLD = self.embed_tokens(tokens_BL).to(self.dtype)
        x_BLD = x_BLD + self.embed_positions(positions_BL).to(self.dtype)
        for block in self.layers:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns scores of the next token, in float32 at least."""
        return widen(F.linear(hidden, self.embed_tokens.embedding_weight.to(hidden.dtype)))


def arch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys under `arch` of the net that a config.json describes."""
    for key, neutral in NEUTRAL.items():
        if config.get(key, neutral) != neutral:
            raise ConfigError(
                f"config.json has {key}={brief(config[key])}; only {neutral} can be read"
            )
    # transformers' own defaults replace keys that a config.json leaves out
    known = {key: config[key] for key in Shape.model_fields if key in config}
    return {"_target_": f"{__name__}.GPT2"} | known


def as_ours(files: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Renames published tensors, and transposes matrices, which are [inputs, outputs] there."""
    ours = {}
    for name, tensor in (item for file in files for item in file.items()):
        name = name.removeprefix("transformer.")
        block = IN_BLOCK.fullmatch(name)
        if block is not None and block[2] in BLOCK:
            name = f"layers.{block[1]}.{BLOCK[block[2]]}.{block[3]}"
            tensor = tensor.t().contiguous() if tensor.ndim == 2 else tensor
        if not UNUSED.fullmatch(name):
            ours[AROUND.get(name, name)] = tensor
    return ours
