"""Continues a text token by token on a CPU, in as few operations as possible.

A token of one row is so little work that calling operations takes most of the time. Weights are
cast and laid out once per continuation, keys and values are written into one tensor for all
layers, and no module, autograd function or concatenation stands between the operations. The
numbers are those of `GPT.next_logits`, up to rounding.
"""

# B batch, L positions, D width, V vocabulary, H heads, N heads of queries and keys, K head width

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import halves
from models.language.gpt import GPT, DecoderBlock
from models.layers import (
    Attention,
    Embedding,
    Linear,
    Past,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    widen,
)

KNOWN = (
    GPT,
    DecoderBlock,
    Attention,
    SwiGLU,
    Linear,
    RMSNorm,
    Embedding,
    RotaryEmbedding,
    nn.ModuleList,
)


class Layer(NamedTuple):
    """The weights of a block, in the forward dtype."""

    before_heads: Tensor
    heads: Tensor
    heads_bias: Tensor | None
    head_norms_NK: Tensor | None
    mix: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


def applies(net: nn.Module) -> bool:
    """Returns whether a net is a GPT on a CPU of the parts that this file computes, neither sharded
    nor replaced by those of a decomposition or of another net. Hooks are not called.
    """
    parameters = list(net.parameters())
    return all(type(part) in KNOWN for part in net.modules()) and all(
        type(each) is nn.Parameter and each.device.type == "cpu" for each in parameters
    )


def reader(net: GPT, room: int) -> LeanReader | Reader:
    """Returns what reads a text of at most `room` tokens, and scores the token that follows."""
    return LeanReader(net, room) if applies(net) else Reader(net)


class LeanReader:
    """Reads in as few operations as possible, after the prompt."""

    def __init__(self, net: GPT, room: int) -> None:
        """`room` is the number of positions to keep keys and values for."""
        self.net, self.room, shape = net, min(room, net.seq_len), net.shape
        self.heads, self.keys, self.width = shape.num_heads, shape.keys, shape.head_width
        self.eps, self.norms_heads = shape.rms_norm_eps, shape.qk_norm
        self.layers = [self._layer(block) for block in net.blocks]
        self.norm = self._cast(net.norm.weight)
        output = net.embed_tokens.embedding_weight if net.lm_head is None else net.lm_head.weight
        self.output = self._cast(output)
        cos_LK, sin_LK = net.rotary_emb()
        first_LK, second_LK = sin_LK.chunk(2, dim=-1)
        self.cos_LK, self.sin_LK = cos_LK, torch.cat((-first_LK, second_LK), dim=-1)
        self.other_K = torch.arange(self.width).roll(self.width // 2)
        self.length = 0
        self.seen = torch.empty(0)

    def forget(self) -> None:
        """Empties the context."""
        self.length = 0

    @torch.no_grad()
    def next_logits(self, tokens_BL: Tensor) -> Tensor:
        """Returns the scores of the token that follows these and all that were given before."""
        if tokens_BL.shape[1] > 1 or not self.length:
            return self._begin(tokens_BL)
        with torch.inference_mode():  # views cost less than without gradients alone
            return self._go_on(tokens_BL[:, 0])

    def _go_on(self, tokens_B: Tensor) -> Tensor:
        """Reads one token behind others."""
        here = self.seen.select(3, self.length).unbind(0)
        self.length += 1
        seen = self.seen.narrow(3, 0, self.length).unbind(0)
        cos_K, sin_K = self.cos_LK[self.length - 1], self.sin_LK[self.length - 1]
        x_BD = self.net.embed(tokens_B)
        for number, layer in enumerate(self.layers):
            normed_BD = self._rms_norm(x_BD) * layer.before_heads
            by_head_BHK = F.linear(normed_BD, layer.heads, layer.heads_bias).view(
                len(x_BD), -1, self.width
            )
            mixed_BNK, value_BHK = by_head_BHK.split((self.heads + self.keys, self.keys), dim=1)
            query_BHK, key_BHK = self._turned(mixed_BNK, layer, cos_K, sin_K).split(
                (self.heads, self.keys), dim=1
            )
            here[2 * number].copy_(key_BHK)
            here[2 * number + 1].copy_(value_BHK)
            attended_BHLK = halves.attention(
                query_BHK.unsqueeze(2),
                seen[2 * number],
                seen[2 * number + 1],
                shared_keys=self.keys < self.heads,
            )
            x_BD = x_BD + F.linear(attended_BHLK.reshape(len(x_BD), -1), layer.mix)
            both_BF = F.linear(self._rms_norm(x_BD) * layer.before_mlp, layer.gate_up)
            gate_BF, up_BF = both_BF.chunk(2, dim=-1)
            x_BD = x_BD + F.linear(F.silu(gate_BF).mul_(up_BF), layer.down)
        logits_BV = widen(F.linear(self._rms_norm(x_BD) * self.norm, self.output))
        cap = self.net.shape.logit_cap
        return logits_BV if cap is None else cap * torch.tanh(logits_BV / cap)

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.net.dtype)

    def _layer(self, block: DecoderBlock) -> Layer:
        attention, mlp, cast = block.self_attn, block.mlp, self._cast
        weighs = attention.norm_weights
        return Layer(
            before_heads=cast(block.attn_norm.weight),
            heads=cast(attention.qkv_proj.weight),
            heads_bias=None if attention.qkv_proj.bias is None else cast(attention.qkv_proj.bias),
            head_norms_NK=self._head_norms(attention) if weighs else None,
            mix=cast(attention.o_proj.weight),
            before_mlp=cast(block.mlp_norm.weight),
            gate_up=cast(mlp.gate_up_proj.weight),
            down=cast(mlp.down_proj.weight),
        )

    def _head_norms(self, attention: Attention) -> Tensor:
        """Returns the weights of the norms of queries and keys, for each head."""
        query_K, key_K = self._cast(attention.q_norm.weight), self._cast(attention.k_norm.weight)
        return torch.cat((query_K.expand(self.heads, -1), key_K.expand(self.keys, -1)))

    def _begin(self, tokens_BL: Tensor) -> Tensor:
        """Reads a prompt from an empty context."""
        past = [Past() for _ in self.layers]
        logits_BV = self.net.next_logits(tokens_BL, past)
        self.length = past[0].length
        both = ((layer.key, layer.value) for layer in past)
        kept = [each for layer in both for each in layer if each is not None]
        rows, heads, _, width = kept[0].shape
        if self.seen.shape[1:2] != (rows,):
            self.seen = kept[0].new_empty(len(kept), rows, heads, self.room, width)
        torch._foreach_copy_(list(self.seen.narrow(3, 0, self.length).unbind(0)), kept)
        return logits_BV

    def _turned(self, x_BNK: Tensor, layer: Layer, cos_K: Tensor, sin_K: Tensor) -> Tensor:
        """Turns queries and keys by their position, and norms them, where the net does."""
        dtype = x_BNK.dtype
        if layer.head_norms_NK is not None:
            x_BNK = self._rms_norm(x_BNK) * layer.head_norms_NK
        x_BNK = x_BNK.to(cos_K.dtype)
        turned_BNK = (x_BNK * cos_K).add_(x_BNK[..., self.other_K].mul_(sin_K))
        if self.norms_heads and layer.head_norms_NK is None:
            turned_BNK = self._rms_norm(turned_BNK)
        return turned_BNK.to(dtype)

    def _rms_norm(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype.itemsize == 2 else x
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype)


class Reader:
    """Does the same by a net's own `next_logits`, on any device."""

    def __init__(self, net: GPT) -> None:
        self.net = net
        self.forget()

    @property
    def length(self) -> int:
        """The number of positions in the context; a net without blocks keeps none, so that its
        context is always full.
        """
        return self.past[0].length if self.past else self.net.seq_len

    def forget(self) -> None:
        """Empties the context."""
        self.past = [Past() for _ in self.net.blocks]

    def next_logits(self, tokens_BL: Tensor) -> Tensor:
        """Returns the scores of the token that follows these and all that were given before."""
        return self.net.next_logits(tokens_BL, self.past)
