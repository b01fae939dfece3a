"""Building blocks of the nets; parameters are named as in HRM's and TRM's checkpoints."""

# The suffix of a tensor's name spells its shape, one letter for each dimension: `x_BLD` is
# [batch, positions, width]. Each file lists its letters at the top, as here:
# B batch, L positions, D width, H heads, K head width, F hidden width of the MLP

from __future__ import annotations

import math
import os
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Doc

from contract import Dropout
from models import documents
from models.attention import attention, attention_within
from models.documents import Sees
from utils.command.marks import Keys
from utils.errors import ConfigError
from utils.noise import LEFT_BY_CUTTING

CosSin = tuple[Tensor, Tensor]
# float64 is for comparing runs: it keeps weights in float64, too, so that rounding hides no
# difference
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Computes again in the backward pass, and to the end: the exception by which PyTorch 2.11 stops
# early was lost on CUDA
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, early_stop=False)

# types of keys
Width = Annotated[int, Field(ge=1, le=1 << 20)]
Layers = Annotated[int, Field(ge=1, le=1000)]
ForwardDtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32", "float64"],
    Doc("auto: bfloat16 where the machine is fast at it, else float32"),
]


def lecun_normal(*shape: int, std: float) -> Tensor:
    """Draws from a normal distribution, cut at two sigma, with a standard deviation of `std`."""
    untruncated = std / LEFT_BY_CUTTING
    return nn.init.trunc_normal_(
        torch.empty(shape), std=untruncated, a=-2 * untruncated, b=2 * untruncated
    )


def widen(x: Tensor) -> Tensor:
    """Converts half precision to float32, where half precision would lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def is_eager_half(x: Tensor) -> bool:
    """In half precision, and without a compiler that chooses what the backward pass keeps."""
    return x.dtype.itemsize == 2 and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Divides by the root mean square of the last dimension, then multiplies by a weight."""
    if is_eager_half(x):
        return HalfNorm.apply(x, weight, eps)
    wide = widen(x)
    normed = (wide * _inverse_size(wide, eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def _inverse_size(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class HalfNorm(torch.autograd.Function):
    """The same to the bit, but keeps `x` as it is: autograd would keep it in float32, and the norm
    without the weight too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide, ctx.eps = x.float(), eps
        scale = _inverse_size(wide, eps)
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return normed if weight is None else normed * weight

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad_weight = x.float(), None
        if torch.is_grad_enabled():  # for a second derivative, which needs to know how it was made
            scale = _inverse_size(wide, ctx.eps)
        if weight is not None:
            grad_weight = (grad * (wide * scale).to(x.dtype)).sum_to_size(weight.shape)
            grad = grad * weight
        # autograd's formulas, in their order
        wide_grad = grad.float()
        grad_scale = (wide_grad * wide).sum(-1, keepdim=True)
        grad_mean = -0.5 * grad_scale * scale.pow(3)
        grad_wide = wide_grad * scale + grad_mean / x.shape[-1] * (2 * wide)
        return grad_wide.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Divides by the root mean square, then multiplies each number by a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight.to(x.dtype))


def cast_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts a module's parameters to the forward dtype, once for any number of passes."""
    return {name: parameter.to(dtype) for name, parameter in module.named_parameters()}


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype that a net computes in. The run has resolved `auto` before."""
    return DTYPES[name]


def check_memory(weights: int) -> None:
    """Raises ConfigError if this many weights do not fit into this machine's memory.

    Weights are drawn on the CPU for every device. On the meta device, which holds no
    numbers, a net may have any size.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.get_default_device().type != "meta" and 4 * weights > memory:
        raise ConfigError(
            f"arch: a net with {weights:,} weights needs {4 * weights / 2**30:,.0f} GiB, and this"
            f" machine has {memory / 2**30:,.0f}; choose smaller sizes"
        )


class Linear(nn.Module):
    """A linear map with truncated LeCun initialisation."""

    def __init__(self, width_in: int, width_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(lecun_normal(width_out, width_in, std=width_in**-0.5))
        self.bias = nn.Parameter(torch.zeros(width_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Computes in the precision of `x`; weights that are cast already are used as they are."""
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )

    def wide(self, x: Tensor) -> Tensor:
        """Computes in float32 at least, for a few outputs that decide much."""
        return F.linear(
            widen(x), widen(self.weight), None if self.bias is None else widen(self.bias)
        )


class Embedding(nn.Module):
    """A small table of rows, trained by dense gradients."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(lecun_normal(rows, width, std=std))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_weight)


class Scaling(Keys):
    """Llama 3's way to longer contexts: rotations that take longer than the context of the first
    training are slowed down, fast ones stay, and those between are blended.
    """

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveFloat

    def slow_down(self, rates_K: Tensor) -> Tensor:
        """Returns by how much each pair of numbers turns from one position to the next."""
        turns_K = self.original_max_position_embeddings / (2 * math.pi) * rates_K
        between = self.high_freq_factor - self.low_freq_factor
        kept_K = ((turns_K - self.low_freq_factor) / between).clamp(0, 1)
        return rates_K * (kept_K + (1 - kept_K) / self.factor)


class RotaryEmbedding(nn.Module):
    """The cosines and sines of rotary positions, in the half-split layout."""

    share = 2  # the head width must be a multiple of this
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_width: int,
        prefix: int,
        tokens: int,
        theta: float,
        dtype: torch.dtype = torch.float32,
        scaling: Scaling | None = None,
    ) -> None:
        """The table is computed in float64 for a net that computes in float64, else in float32."""
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.scaling = scaling
        angles_LK = self.angles(head_width, prefix, tokens, theta, wide).repeat(1, 2)
        self.register_buffer("cos", angles_LK.cos(), persistent=False)
        self.register_buffer("sin", angles_LK.sin(), persistent=False)

    def angles(
        self, head_width: int, prefix: int, tokens: int, theta: float, dtype: torch.dtype
    ) -> Tensor:
        """Returns the angle by which each pair of numbers turns at each position."""
        positions_L = torch.arange(prefix + tokens, dtype=dtype)
        return turns_of(positions_L, head_width // 2, theta, self.scaling)

    def forward(self) -> CosSin:
        return self.cos, self.sin


def turns_of(
    positions_L: Tensor, pairs: int, theta: float, scaling: Scaling | None = None
) -> Tensor:
    """Returns the angle of each pair of numbers at each position."""
    # pair k turns by theta^(-k / pairs) for each position: fast ones first, slow ones last
    exponents = torch.arange(0, 2 * pairs, 2, dtype=positions_L.dtype) / (2 * pairs)
    rates_K = 1.0 / theta**exponents
    return torch.outer(positions_L, rates_K if scaling is None else scaling.slow_down(rates_K))


def rotate(x_BHLK: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotates queries or keys by their positions, in the precision of the angles."""
    cos_LK, sin_LK = cos_sin
    x = x_BHLK.to(cos_LK.dtype)
    first, second = x.chunk(2, dim=-1)
    return (x * cos_LK + torch.cat((-second, first), dim=-1) * sin_LK).to(x_BHLK.dtype)


class Attention(nn.Module):
    """Self-attention, as `models/attention.py` computes it. Several heads may share keys and
    values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int = 0,
        norm_eps: float | None = None,
        head_width: int = 0,
        norm_weights: bool = False,
        bias: bool = False,
        bias_out: bool = False,
    ) -> None:
        """With `norm_eps`, queries and keys are normed, so that scores stay bounded; with
        `norm_weights` before they are turned. `bias` is that of queries, keys and values.
        """
        super().__init__()
        self.heads, self.kv_heads, self.norm_eps = heads, kv_heads or heads, norm_eps
        self.head_width = head_width or width // heads
        self.qkv_proj = Linear(width, (heads + 2 * self.kv_heads) * self.head_width, bias)
        self.o_proj = Linear(heads * self.head_width, width, bias_out)
        self.norm_weights = norm_weights and norm_eps is not None
        if norm_weights and norm_eps is not None:
            self.q_norm = RMSNorm(self.head_width, norm_eps)
            self.k_norm = RMSNorm(self.head_width, norm_eps)
        # which outputs of the fused matrix belong to which projection, in their order
        queries, keys = heads * self.head_width, self.kv_heads * self.head_width
        self.fused = {"qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys}}

    def forward(
        self,
        x_BLD: Tensor,
        cos_sin: CosSin | None,
        causal: bool = False,
        mask: Sees = None,
        past: Past | None = None,
    ) -> Tensor:
        batch, length, _ = x_BLD.shape
        query, key, value = self.heads_of(x_BLD, cos_sin)
        if past is not None:
            key, value = past.extend(key, value)
        shared_keys = self.kv_heads < self.heads
        # documents come as bounds on a GPU, as lengths on a CPU, and as a mask elsewhere
        if isinstance(mask, documents.Packed):
            mixed_BHLK = documents.attention_packed(query, key, value, mask, shared_keys)
        elif isinstance(mask, list):
            mixed_BHLK = attention_within(query, key, value, mask, shared_keys)
        else:
            mixed_BHLK = attention(query, key, value, mask, causal, shared_keys)
        return self.o_proj(mixed_BHLK.transpose(1, 2).reshape(batch, length, -1))

    def heads_of(self, x_BLD: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys, turned and normed, and values."""
        heads_BHLK = self.qkv_proj(x_BLD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query, key, value = heads_BHLK.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        # Qwen3 norms before the rotation, with weights; without weights the order would not matter,
        # and ours norm last
        if self.norm_weights:
            query, key = self.q_norm(query), self.k_norm(key)
        if cos_sin is not None:
            query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        if self.norm_eps is not None and not self.norm_weights:
            query, key = rms_norm(query, self.norm_eps), rms_norm(key, self.norm_eps)
        return query, key, value


class Past:
    """Keys and values of earlier positions: a continuation computes each position once."""

    def __init__(self, key_BHLK: Tensor | None = None, value_BHLK: Tensor | None = None) -> None:
        self.key, self.value = key_BHLK, value_BHLK

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def extend(self, key_BHLK: Tensor, value_BHLK: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of further positions, and returns those of all."""
        if self.key is not None and self.value is not None:
            key_BHLK = torch.cat((self.key, key_BHLK), 2)
            value_BHLK = torch.cat((self.value, value_BHLK), 2)
        self.key, self.value = key_BHLK, value_BHLK
        return key_BHLK, value_BHLK


def gated_width(width: int, expansion: float, multiple: int) -> int:
    """Returns the hidden width of a gated MLP, rounded up to a multiple.

    It is two thirds of `expansion` times the width, as gating takes three matrices and not two.
    """
    return -(-round(expansion * width * 2 / 3) // multiple) * multiple


class SwiGLU(nn.Module):
    """A gated MLP. With `norm_eps`, the gated numbers are normed (Dillon 2026, arXiv 2601.19085),
    which makes Muon's large steps harmless.
    """

    def __init__(self, width: int, hidden: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.gate_up_proj = Linear(width, 2 * hidden)
        self.down_proj = Linear(hidden, width)
        self.fused = {"gate_up_proj": {"gate_proj": hidden, "up_proj": hidden}}

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        # as compiled code does, and so a plan counts; on a CPU it takes longer than it is worth
        if is_eager_half(x) and x.device.type != "cpu" and torch.is_grad_enabled():
            return self.down_proj(recomputed(self._gated, both))
        return self.down_proj(self._gated(both))

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gated(gate, up, self.norm_eps)


def gated(gate: Tensor, up: Tensor, norm_eps: float | None) -> Tensor:
    """Multiplies by SiLU gates; with `norm_eps`, as `SwiGLU` says."""
    if norm_eps is None:
        return F.silu(gate) * up
    return torch.sigmoid(gate) * rms_norm(gate * up, norm_eps)


class PreNormBlock(nn.Module):
    """Attention, then a gated MLP; each reads a norm of the stream, and adds to the stream."""

    def __init__(
        self, width: int, eps: float, attention: Attention, mlp: SwiGLU, dropout: float = 0.0
    ) -> None:
        """`dropout` is the rate for what either adds."""
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn, self.mlp = attention, mlp
        self.attn_dropout, self.mlp_dropout = (
            Dropout(dropout) if dropout else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        x_BLD: Tensor,
        cos_sin: CosSin,
        causal: bool,
        mask: Sees,
        past: Past | None = None,
    ) -> Tensor:
        mixed_BLD = self.self_attn(self.attn_norm(x_BLD), cos_sin, causal, mask, past)
        x_BLD = x_BLD + self.attn_dropout(mixed_BLD)
        return x_BLD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BLD)))
