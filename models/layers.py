"""Building blocks of the recursive nets. Parameter names are those of the published HRM and TRM checkpoints."""

# B batch, L positions, D width, H heads, K head width, F hidden width of the MLP

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import halves
from utils.errors import ConfigError

CosSin = tuple[Tensor, Tensor]
# float64 is for comparing runs: weights are then kept in it too, and rounding no longer hides differences
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def lecun_normal(*shape: int, std: float) -> Tensor:
    """Normal truncated at two sigma whose standard deviation after truncation is `std`."""
    untruncated = std / 0.87962566103423978
    return nn.init.trunc_normal_(torch.empty(shape), std=untruncated, a=-2 * untruncated, b=2 * untruncated)


def widen(x: Tensor) -> Tensor:
    """In float32 at least, where half precision would lose too much."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension."""
    if halves.spares_passes(x):
        return halves.Norm.apply(x, eps)
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """Division by the root mean square, and a weight for every number."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps) * self.weight.to(x.dtype)


def cast_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module's parameters in the forward dtype, cast here once for any number of passes over them."""
    return {name: parameter.to(dtype) for name, parameter in module.named_parameters()}


def parse_dtype(name: str) -> torch.dtype:
    """What a net computes in; a run has replaced `auto` before."""
    if name not in DTYPES:
        raise ConfigError(f"arch.forward_dtype={name}: choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


class Linear(nn.Module):
    """A linear map with truncated LeCun initialisation."""

    def __init__(self, width_in: int, width_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(lecun_normal(width_out, width_in, std=width_in**-0.5))
        self.bias = nn.Parameter(torch.zeros(width_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """In the precision of `x`; weights that were cast before are taken as they are."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def wide(self, x: Tensor) -> Tensor:
        """In float32 at least: for a few outputs that decide much, of which half precision saves nothing."""
        return F.linear(widen(x), widen(self.weight), None if self.bias is None else widen(self.bias))


class Embedding(nn.Module):
    """A small table, trained densely."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(lecun_normal(rows, width, std=std))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_weight)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions, in the half-split layout."""

    share = 2  # what the head width is a multiple of
    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, prefix: int, tokens: int, theta: float) -> None:
        super().__init__()
        angles_LK = self.angles(head_width, prefix, tokens, theta).repeat(1, 2)
        self.register_buffer("cos", angles_LK.cos(), persistent=False)
        self.register_buffer("sin", angles_LK.sin(), persistent=False)

    def angles(self, head_width: int, prefix: int, tokens: int, theta: float) -> Tensor:
        """By how much each pair of numbers turns at each position."""
        return _turns(torch.arange(prefix + tokens, dtype=torch.float32), head_width // 2, theta)

    def forward(self) -> CosSin:
        return self.cos, self.sin


class GridRotaryEmbedding(RotaryEmbedding):
    """Tokens of a square grid: half of each head turns by the row, half by the column. The prefix goes down to the grid's first corner."""

    share = 4

    def angles(self, head_width: int, prefix: int, tokens: int, theta: float) -> Tensor:
        side = math.isqrt(tokens)
        if side * side != tokens:
            raise ConfigError(f"arch.pos_encodings=rope2d: {tokens} tokens are no square grid; choose rope")
        before, cells = torch.arange(-prefix, 0), torch.arange(tokens)
        places = (torch.cat((before, cells // side)), torch.cat((before, cells % side)))
        return torch.cat([_turns(place.float(), head_width // 4, theta) for place in places], dim=1)


def _turns(positions_L: Tensor, pairs: int, theta: float) -> Tensor:
    return torch.outer(positions_L, 1.0 / theta ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / (2 * pairs)))


ROPES = {"rope": RotaryEmbedding, "rope2d": GridRotaryEmbedding}


def rotate(x_BHLK: Tensor, cos_sin: CosSin) -> Tensor:
    """Turn queries or keys by their position, in the precision of the angles."""
    if halves.spares_passes(x_BHLK):
        return halves.Rotate.apply(x_BHLK, *cos_sin)
    cos_LK, sin_LK = cos_sin
    x = x_BHLK.to(cos_LK.dtype)
    first, second = x.chunk(2, dim=-1)
    return (x * cos_LK + torch.cat((-second, first), dim=-1) * sin_LK).to(x_BHLK.dtype)


class Attention(nn.Module):
    """Self-attention through PyTorch's fused kernel; several heads may share their keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int = 0, norm_eps: float | None = None) -> None:
        """With `norm_eps`, queries and keys are normed, and scores cannot grow without bound."""
        super().__init__()
        self.heads, self.kv_heads, self.norm_eps = heads, kv_heads or heads, norm_eps
        self.qkv_proj = Linear(width, (heads + 2 * self.kv_heads) * (width // heads))
        self.o_proj = Linear(width, width)

    def forward(
        self, x_BLD: Tensor, cos_sin: CosSin | None, causal: bool = False, mask: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        batch, length, width = x_BLD.shape
        heads_BHLK = self.qkv_proj(x_BLD).view(batch, length, -1, width // self.heads).transpose(1, 2)
        query, key, value = heads_BHLK.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if cos_sin is not None:
            query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        if self.norm_eps is not None:
            query, key = rms_norm(query, self.norm_eps), rms_norm(key, self.norm_eps)
        if past is not None:
            key, value = past.extended(key, value)
        shared = self.kv_heads < self.heads
        mixed_BHLK = halves.attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        return self.o_proj(mixed_BHLK.transpose(1, 2).reshape(batch, length, width))


class Past:
    """Keys and values of the positions before, so that a continuation computes each position once."""

    def __init__(self, key_BHLK: Tensor | None = None, value_BHLK: Tensor | None = None) -> None:
        self.key, self.value = key_BHLK, value_BHLK

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def to(self, device: torch.device) -> Past:
        """The same on another device."""
        return Past(*(None if each is None else each.to(device) for each in (self.key, self.value)))

    def repeated(self, times: int) -> Past:
        """Each row so many times."""
        return Past(*(None if each is None else each.repeat_interleave(times, 0) for each in (self.key, self.value)))

    def extended(self, key_BHLK: Tensor, value_BHLK: Tensor) -> tuple[Tensor, Tensor]:
        """With these behind what is known already, which are then known, too."""
        if self.key is not None and self.value is not None:
            key_BHLK, value_BHLK = torch.cat((self.key, key_BHLK), 2), torch.cat((self.value, value_BHLK), 2)
        self.key, self.value = key_BHLK, value_BHLK
        return key_BHLK, value_BHLK


def gated_width(width: int, expansion: float, multiple: int) -> int:
    """Two thirds of `expansion` times the width, as gating takes three matrices instead of two, rounded up to a multiple."""
    return -(-round(expansion * width * 2 / 3) // multiple) * multiple


class SwiGLU(nn.Module):
    """Gated MLP. With `norm_eps` what is gated is normed before (Dillon 2026, arXiv 2601.19085): Muon's large steps then stay harmless."""

    def __init__(self, width: int, hidden: int, norm_eps: float | None = None) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.gate_up_proj = Linear(width, 2 * hidden)
        self.down_proj = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.norm_eps is None:
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(torch.sigmoid(gate) * rms_norm(gate * up, self.norm_eps))


class Block(nn.Module):
    """Mix over positions, then over channels, each with a residual and a norm after it."""

    def __init__(self, width: int, heads: int, mlp: Callable[[int], SwiGLU], eps: float, mix_positions: int = 0) -> None:
        super().__init__()
        if mix_positions:  # tokens are mixed by an MLP over this many positions
            self.mlp_t = mlp(mix_positions)
        else:
            self.self_attn = Attention(width, heads)
        self.mixes_by_mlp = bool(mix_positions)
        self.mlp = mlp(width)
        self.eps = eps

    def forward(self, x_BLD: Tensor, cos_sin: CosSin | None) -> Tensor:
        if self.mixes_by_mlp:
            x_BDL = halves.in_order(x_BLD.transpose(1, 2))
            x_BLD = halves.in_order(rms_norm(x_BDL + self.mlp_t(x_BDL), self.eps).transpose(1, 2))
        else:
            x_BLD = rms_norm(x_BLD + self.self_attn(x_BLD, cos_sin), self.eps)
        return rms_norm(x_BLD + self.mlp(x_BLD), self.eps)


class Level(nn.Module):
    """A stack of blocks applied again and again; the input is added to the state before each pass."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, state_BLD: Tensor, injected_BLD: Tensor, cos_sin: CosSin | None) -> Tensor:
        x_BLD = state_BLD + injected_BLD
        for block in self.layers:
            x_BLD = block(x_BLD, cos_sin)
        return x_BLD
