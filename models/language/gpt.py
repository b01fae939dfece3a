"""A decoder-only language model: the net of the Llama family, with improvements as options."""

# B batch, L positions, D width, V vocabulary, H heads, K head width

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from contract import Spec
from models import documents
from models.documents import Sees
from models.layers import (
    Attention,
    Embedding,
    ForwardDtype,
    Layers,
    Linear,
    Past,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    Scaling,
    SwiGLU,
    Width,
    check_memory,
    gated_width,
    parse_dtype,
    recomputed,
    widen,
)
from utils.command.marks import Fraction, Keys
from utils.errors import ConfigError

STD = 0.02  # of embeddings and of the output, as in GPT-2


class Shape(Keys):
    """The keys under `arch`."""

    num_layers: Layers
    hidden_size: Width
    num_heads: PositiveInt
    kv_heads: PositiveInt | None
    """Groups of heads share so many keys and values; null: num_heads"""
    mlp_width: PositiveInt | None
    """null: 8/3 of hidden_size, rounded up to a multiple of 64"""
    tied: bool
    """The output layer uses the weights of the embedding"""
    qk_norm: bool
    """Normalises queries and keys"""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Rate for what blocks add to the stream, in training: for texts that are seen many times"""
    recompute: bool
    """Computes blocks again in the backward pass: less memory, a third more work"""
    rms_norm_eps: Fraction
    rope_theta: PositiveFloat
    """Base of the rotary frequencies"""
    forward_dtype: ForwardDtype
    head_dim: Annotated[int, Field(ge=2)] | None
    """The width of a head; null: hidden_size / num_heads"""
    qk_weights: bool
    """These norms have weights and come before the rotation, as in Qwen3"""
    qkv_bias: bool
    """Queries, keys and values have biases, as in Qwen2"""
    rope_scaling: Scaling | None
    """As in Llama 3.1: {factor: 8, low_freq_factor: 1, high_freq_factor: 4,
    original_max_position_embeddings: 8192}
    """

    def check(self) -> None:
        """Raises ConfigError for keys that do not go together."""
        # rotary positions turn pairs of numbers, so that a head's width is even
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(
                f"arch.head_dim={self.head_dim}: positions turn pairs of numbers; try"
                f" {self.head_dim + 1}"
            )
        if self.qk_weights and not self.qk_norm:
            raise ConfigError("arch.qk_weights=true: needs norms to weigh; add arch.qk_norm=true")
        if (scaling := self.rope_scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ConfigError(
                f"arch.rope_scaling.low_freq_factor={scaling.low_freq_factor}: must be less than"
                f" high_freq_factor={scaling.high_freq_factor}"
            )
        # sizes that do not divide would leave heads or groups of different sizes
        if self.head_dim is None and self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"arch.hidden_size={self.hidden_size} is not a multiple of two times"
                f" arch.num_heads={self.num_heads}"
            )
        if self.num_heads % self.keys:
            raise ConfigError(
                f"arch.kv_heads={self.keys} does not divide arch.num_heads={self.num_heads}; every"
                " group of heads must have the same size"
            )

    @property
    def weights(self) -> int:
        """The number of weights in the matrices of the blocks."""
        attention = 2 * self.hidden_size * (self.num_heads + self.keys) * self.head_width
        return self.num_layers * (attention + 3 * self.hidden_size * self.gated)

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def keys(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.num_heads

    @property
    def gated(self) -> int:
        """The hidden width of the MLP."""
        return self.mlp_width or gated_width(self.hidden_size, 4.0, 64)


class GPT(nn.Module):
    """Turns tokens into hidden states, from which `logits` makes scores of the next token.

    Each weight is cast where it is used, so that blocks may be split over ranks one by one.
    """

    def __init__(self, spec: Spec, keys: Shape) -> None:
        super().__init__()
        keys.check()
        self.shape = shape = keys
        # puzzles have a vocabulary, too, but their answers are not the next tokens
        if not (spec.vocab_size and spec.seq_len) or hasattr(spec, "table_rows"):
            raise ConfigError("arch=gpt needs text; use data=tokens or data=stream")
        self.dtype = parse_dtype(shape.forward_dtype)
        self.seq_len, self.token_bytes = spec.seq_len, getattr(spec, "token_bytes", ())
        self.most_documents = getattr(spec, "most_documents", 0)
        if self.most_documents:
            documents.load_kernel()
        width = shape.hidden_size
        check_memory(shape.weights + (2 - shape.tied) * width * spec.vocab_size)
        self.embed_tokens = Embedding(spec.vocab_size, width, STD)
        self.layers = nn.ModuleList(self.block() for _ in range(shape.num_layers))
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.lm_head = None if shape.tied else Linear(width, spec.vocab_size)
        # no puzzle prefix before the text: its length is 0
        self.rotary_emb = RotaryEmbedding(
            shape.head_width, 0, spec.seq_len, shape.rope_theta, self.dtype, shape.rope_scaling
        )
        with torch.no_grad():
            # so that the stream grows by its own size, however many layers add to it
            for layer in self.blocks:
                for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    output.weight.mul_((2 * shape.num_layers) ** -0.5)
            if self.lm_head is not None:  # from 1 / √width to the embedding's deviation
                self.lm_head.weight.mul_(STD * width**0.5)

    def block(self) -> PreNormBlock:
        shape, eps = self.shape, self.shape.rms_norm_eps
        attention = Attention(
            shape.hidden_size,
            shape.num_heads,
            kv_heads=shape.keys,
            norm_eps=eps if shape.qk_norm else None,
            head_width=shape.head_width,
            norm_weights=shape.qk_weights,
            bias=shape.qkv_bias,
        )
        mlp = SwiGLU(shape.hidden_size, shape.gated)
        return PreNormBlock(shape.hidden_size, eps, attention, mlp, shape.dropout)

    @property
    def blocks(self) -> Sequence[PreNormBlock]:
        """The blocks, each of which may be compiled, recomputed or split alone."""
        return list(self.layers)  # type: ignore[arg-type]

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Returns normed hidden states. Each position sees itself and those before it; with
        `documents_BL`, the number of each position's document, only those of its document.
        """
        mask = None
        if documents_BL is not None:
            mask = documents.within(
                documents_BL, self.most_documents, self.dtype, self.shape.head_width
            )
        return self.read(self.embed(tokens_BL), mask)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Returns the vectors with which the stream begins."""
        return self.embed_tokens(tokens_BL).to(self.dtype)

    @property
    def head(self) -> nn.Module:
        """The module whose weights `logits` uses."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns scores of the next token, in float32 at least."""
        if self.lm_head is not None:
            return widen(self.lm_head(hidden))
        tied = self.embed_tokens.embedding_weight
        return widen(F.linear(hidden, tied.to(hidden.dtype)))

    def next_logits(self, tokens_BL: Tensor, past: Sequence[Past]) -> Tensor:
        """Returns scores of the token that follows these.

        `past`, one for each block, has the tokens before them, and takes these in as well.
        """
        first, length = past[0].length, tokens_BL.shape[1]
        assert not first or length == 1, "several tokens behind others would need a mask"
        # positions continue where the past ends
        cos, sin = self.rotary_emb()
        cos_sin = cos[first : first + length], sin[first : first + length]
        x_BLD = self.embed(tokens_BL)
        for block, before in zip(self.blocks, past, strict=True):
            x_BLD = block(x_BLD, cos_sin, length > 1, None, before)
        return self.logits(self.norm(x_BLD[:, -1]))

    def read(
        self,
        x_BLD: Tensor,
        mask: Sees = None,
        positions_BL: Tensor | None = None,
        past: Sequence[Past] | None = None,
    ) -> Tensor:
        """Returns normed hidden states of a stream, which need not come from tokens.

        Its positions are 0, 1, 2 and so on, unless given. Without a mask, each sees itself and
        those before it. `past` has one for each block; what it holds before them needs a mask.
        """
        # angles of the positions: a slice, or looked up for each row where rows differ
        cos, sin = self.rotary_emb()
        if positions_BL is None:
            cos_sin = cos[: x_BLD.shape[1]], sin[: x_BLD.shape[1]]
        else:
            cos_sin = cos[positions_BL].unsqueeze(1), sin[positions_BL].unsqueeze(1)
        for number, block in enumerate(self.blocks):
            before = None if past is None else past[number]
            if self.shape.recompute and torch.is_grad_enabled():
                x_BLD = recomputed(block, x_BLD, cos_sin, mask is None, mask, before)
            else:
                x_BLD = block(x_BLD, cos_sin, mask is None, mask, before)
        return self.norm(x_BLD)

    def flops_per_token(self) -> int:
        """Returns the operations of forward and backward, without recomputation.

        Counts as PaLM does (Chowdhery et al. 2022, appendix B), which others compare by: 6 for each
        weight of a matrix product, and attention as if nothing were masked.
        """
        weights = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2)
        weights += self.embed_tokens.embedding_weight.numel()  # the output's, tied or not
        width = self.shape.num_heads * self.shape.head_width
        return 6 * weights + 12 * len(self.layers) * width * self.seq_len
