"""A decoder-only language model: the Llama family's net, with what has paid since as options."""

# B batch, L positions, D width, V vocabulary, H heads, K head width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.layers import (
    Attention,
    CosSin,
    Embedding,
    Linear,
    Past,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    gated_width,
    parse_dtype,
    widen,
)
from utils.errors import ConfigError
from utils.spec import Spec

STD = 0.02  # of embeddings and of the output, as in GPT-2


@dataclass(frozen=True)
class Shape:
    """The keys under `arch`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    kv_heads: int | None = None
    mlp_width: int | None = None
    tied: bool = False
    qk_norm: bool = False
    logit_cap: float | None = None
    recompute: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    forward_dtype: str = "float32"

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden_size", "num_heads", "kv_heads", "mlp_width", "logit_cap"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError(f"arch.{key}={value} must be more than 0")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(f"arch.hidden_size={self.hidden_size} is no multiple of two times arch.num_heads={self.num_heads}")
        if self.num_heads % self.keys:
            raise ConfigError(f"arch.kv_heads={self.keys} does not divide arch.num_heads={self.num_heads}; groups of heads have one size")
        parse_dtype(self.forward_dtype)

    @property
    def keys(self) -> int:
        """How many heads have keys and values of their own."""
        return self.kv_heads or self.num_heads

    @property
    def gated(self) -> int:
        """The MLP's width."""
        return self.mlp_width or gated_width(self.hidden_size, 4.0, 64)


class DecoderBlock(nn.Module):
    """Attention to what came before, then a gated MLP; each reads a norm of the stream and adds to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn = Attention(width, shape.num_heads, shape.keys, eps if shape.qk_norm else None)
        self.mlp = SwiGLU(width, shape.gated)

    def forward(self, x_BLD: Tensor, cos_sin: CosSin, causal: bool, mask: Tensor | None, past: Past | None = None) -> Tensor:
        x_BLD = x_BLD + self.self_attn(self.attn_norm(x_BLD), cos_sin, causal, mask, past)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class GPT(nn.Module):
    """Tokens in, hidden states out; `logits` reads them. Every weight is cast where it is used, so it may be sharded by block."""

    def __init__(self, spec: Spec, **keys) -> None:
        super().__init__()
        self.shape = shape = Shape(**keys)
        if not (spec.vocab_size and spec.seq_len) or spec.table_rows:  # puzzles have such, and answers that are no next tokens
            raise ConfigError("arch=gpt needs text; use data=tokens or data=stream")
        self.dtype, self.seq_len, self.token_bytes = parse_dtype(shape.forward_dtype), spec.seq_len, spec.token_bytes
        width = shape.hidden_size
        self.embed_tokens = Embedding(spec.vocab_size, width, STD)
        self.layers = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.lm_head = None if shape.tied else Linear(width, spec.vocab_size)
        self.rotary_emb = RotaryEmbedding(width // shape.num_heads, 0, spec.seq_len, shape.rope_theta)
        with torch.no_grad():
            for layer in self.blocks:  # what is added to the stream adds up to what came in, however many layers there are
                for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    output.weight.mul_((2 * shape.num_layers) ** -0.5)
            if self.lm_head is not None:
                self.lm_head.weight.mul_(STD * width**0.5)

    @property
    def blocks(self) -> Sequence[DecoderBlock]:
        """What may be compiled, recomputed or sharded by itself."""
        return list(self.layers)  # type: ignore[arg-type]

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Normed hidden states; each position sees what came before it, of its own document alone if there are numbers of documents."""
        mask = None if documents_BL is None else _within(documents_BL)
        cos, sin = self.rotary_emb()
        cos_sin = cos[: tokens_BL.shape[1]], sin[: tokens_BL.shape[1]]
        x_BLD = self.embed(tokens_BL)
        for block in self.blocks:
            if self.shape.recompute and torch.is_grad_enabled():
                x_BLD = checkpoint(block, x_BLD, cos_sin, mask is None, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BLD = block(x_BLD, cos_sin, mask is None, mask)
        return self.norm(x_BLD)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Where the stream begins."""
        return self.embed_tokens(tokens_BL).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, in float32 at least."""
        tied = self.embed_tokens.embedding_weight
        logits = F.linear(hidden, tied.to(hidden.dtype)) if self.lm_head is None else self.lm_head(hidden)
        logits, cap = widen(logits), self.shape.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def next_logits(self, tokens_BL: Tensor, past: Sequence[Past]) -> Tensor:
        """Scores of what follows these tokens, which stand behind those that `past`, one for each block, has seen."""
        first, length = past[0].length, tokens_BL.shape[1]
        assert not first or length == 1, "what stands behind others comes one by one: else it would need a mask"
        cos, sin = self.rotary_emb()
        x_BLD, cos_sin = self.embed(tokens_BL), (cos[first : first + length], sin[first : first + length])
        for block, before in zip(self.blocks, past, strict=True):
            x_BLD = block(x_BLD, cos_sin, length > 1, None, before)
        return self.logits(self.norm(x_BLD[:, -1]))

    def read(
        self, x_BLD: Tensor, places_BL: Tensor | None = None, sees: Tensor | None = None, past: Sequence[Past] | None = None
    ) -> Tensor:
        """Normed hidden states of a stream that did not come from tokens alone.

        It stands behind what `past` has, at these places (none: one after the other); `sees` [B or 1, 1, L, all]: at what each looks
        (none: at what came before).
        """
        cos, sin = (each[: x_BLD.shape[1]] if places_BL is None else each[places_BL].unsqueeze(1) for each in self.rotary_emb())
        for number, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, (cos, sin), sees is None, sees, None if past is None else past[number])
        return self.norm(x_BLD)

    def flops_per_token(self) -> int:
        """Of forward and backward, recomputation left out: 6 for each weight of a matrix product, and attention as if nothing were masked.

        That is how PaLM (Chowdhery et al. 2022, appendix B) counts what a model needs, and what others compare by.
        """
        weights = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2) + self.embed_tokens.embedding_weight.numel()
        width = self.norm.weight.numel()
        return 6 * weights + 12 * len(self.layers) * width * self.seq_len


def _within(documents_BL: Tensor) -> Tensor:
    """Whom each position sees: nobody behind it, and nobody of another document."""
    same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    return same_BLL.tril()[:, None]
