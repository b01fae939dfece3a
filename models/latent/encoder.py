"""From a passage to latents, from latents to what a frozen model reads, and back to the passage."""

# B batch, L positions, N slots, M latents, D width, W numbers of a latent, H heads, K head width

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from models.language.targets import GPT
from models.layers import (
    Attention,
    Embedding,
    Linear,
    Past,
    PreNormBlock,
    RMSNorm,
    SwiGLU,
    Width,
    gated_width,
    rms_norm,
    turns_of,
    widen,
)
from utils.command.marks import Keys
from utils.errors import ConfigError

EPS = 1e-5
SCALE_BYTES = 2  # a float16 for each latent whose numbers are rounded to int8


class EncoderKeys(Keys):
    """The keys of the encoder."""

    width: Width
    layers: PositiveInt
    """In which positions of the passage and latents see each other"""

    heads: PositiveInt
    refiner: NonNegativeInt
    """Layers after these, in which latents see each other alone"""

    states: bool
    """Reads the first reader's states of the passage in place of the passage's own tokens"""


def block(width: int, heads: int) -> PreNormBlock:
    """Builds a block whose positions all see each other."""
    if width % (2 * heads):
        raise ConfigError(
            f"arch.encoder.width={width}: is not a multiple of two times arch.encoder.heads={heads}"
        )
    mlp = SwiGLU(width, gated_width(width, 4.0, 32))
    return PreNormBlock(width, EPS, Attention(width, heads, norm_eps=EPS), mlp)


def mean_of_pieces(length: int, count: int) -> Tensor:
    """Returns the matrix [count, L] that takes the means of so many equal pieces."""
    return F.adaptive_avg_pool1d(torch.eye(length), count).mT.contiguous()


class Resample(nn.Module):
    """Turns `length` vectors into `slots` others, evenly spread among them. A slot begins as the
    mean of its piece, and sees all vectors and slots in each layer.
    """

    cos: Tensor
    sin: Tensor
    pieces_NL: Tensor

    def __init__(self, length: int, slots: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(slots, width))
        self.layers = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width, EPS)
        # a slot's position is the centre of its piece, in the passage's own units, so that rotary
        # angles tell which vectors are near
        centres_N = (torch.arange(slots) + 0.5) * length / slots - 0.5
        angles = turns_of(torch.cat((torch.arange(length), centres_N)), width // heads // 2, 1e4)
        for name, table in (
            ("cos", angles.repeat(1, 2).cos()),
            ("sin", angles.repeat(1, 2).sin()),
            ("pieces_NL", mean_of_pieces(length, slots)),
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x_BLD: Tensor, seen_BL: Tensor | None = None) -> Tensor:
        dtype = x_BLD.dtype
        # slots join the sequence as further positions
        slots_BND = self.pieces_NL.to(dtype) @ x_BLD + self.slots.to(dtype)
        x, count = torch.cat((x_BLD, slots_BND), 1), len(self.slots)
        sees = None if seen_BL is None else F.pad(seen_BL, (0, count), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin), False, sees)
        return self.norm(x[:, -count:])


class Encoder(nn.Module):
    """Turns a passage into M latents of W numbers, whose root mean square is 1."""

    def __init__(
        self, length: int, vocab_size: int, states: int, latents: int, wire: int, keys: EncoderKeys
    ) -> None:
        """`states`: the width of the states that it reads in place of tokens; 0: tokens."""
        super().__init__()
        width = keys.width
        self.embed = None if states else Embedding(vocab_size, width, 1.0)
        self.enter = Linear(states, width) if states else None
        self.resample = Resample(length, latents, width, keys.layers, keys.heads)
        self.refiner = nn.ModuleList(block(width, keys.heads) for _ in range(keys.refiner))
        self.norm, self.leave = RMSNorm(width, EPS), Linear(width, wire)

    def forward(self, passage: Tensor, seen_BL: Tensor | None, dtype: torch.dtype) -> Tensor:
        # tokens, or a reader's states, which already know their context
        if self.embed is not None:
            x_BLD = self.embed(passage).to(dtype)
        else:
            assert self.enter is not None
            x_BLD = self.enter(passage)
        x_BMD = self.resample(x_BLD, seen_BL)
        for layer in self.refiner:
            x_BMD = layer(x_BMD, None, False, None)
        return rms_norm(self.leave(self.norm(x_BMD)), EPS)


class Deep(Past):
    """An adapter's offsets to the keys and values of one layer, at the positions of the latents."""

    def __init__(self, key_BHMK: Tensor, value_BHMK: Tensor, start: int) -> None:
        super().__init__(key_BHMK, value_BHMK)
        self._start = start  # the first of these positions

    def extend(self, key_BHLK: Tensor, value_BHLK: Tensor) -> tuple[Tensor, Tensor]:
        assert self.key is not None
        assert self.value is not None
        # nothing is added before the latents (a begin token) and after them (the text)
        after = key_BHLK.shape[2] - self._start - self.key.shape[2]
        room = (0, 0, self._start, after)
        return key_BHLK + F.pad(self.key, room), value_BHLK + F.pad(self.value, room)


class Adapter(nn.Module):
    """Turns latents into vectors of the size of a model's embeddings and, with `deep`, into what is
    added to keys and values of its layers, at first nothing.
    """

    size: Tensor

    def __init__(self, wire: int, net: GPT, deep: bool) -> None:
        super().__init__()
        shape = net.shape
        width = shape.hidden_size
        self.enter, self.norm = Linear(wire, width), RMSNorm(width, EPS)
        self.mlp = SwiGLU(width, gated_width(width, 4.0, 32))
        self.gain = nn.Parameter(torch.zeros(1))
        self.heads = (shape.num_layers, 2, shape.keys, shape.head_width)
        self.deep: Linear | None = None
        if deep:
            self.deep = Linear(width, shape.num_layers * 2 * shape.keys * shape.head_width)
            nn.init.zeros_(self.deep.weight)
        size = widen(net.embed_tokens.embedding_weight).square().mean().sqrt()
        self.register_buffer("size", size, persistent=False)

    def forward(
        self, z_BMW: Tensor, start: int, device: torch.device
    ) -> tuple[Tensor, list[Past] | None]:
        """`start`: the position of the first latent in the model's context. The results are on the
        model's device.
        """
        # a small MLP, whose output has the size of the reader's embeddings, which the reader is
        # used to
        x_BMD = self.enter(z_BMW)
        x_BMD = rms_norm(x_BMD + self.mlp(self.norm(x_BMD)), EPS)
        prefix_BMD = x_BMD * (self.size * self.gain.exp()).to(x_BMD.dtype)
        if self.deep is None:
            return prefix_BMD.to(device), None
        # layers, 2, B, H, M, K
        added = self.deep(x_BMD).unflatten(-1, self.heads).permute(2, 3, 0, 4, 1, 5).to(device)
        return prefix_BMD.to(device), [Deep(key, value, start) for key, value in added]


class Gist(nn.Module):
    """Scores the tokens of a passage, from its latents alone."""

    def __init__(self, length: int, vocab_size: int, latents: int, wire: int, keys: EncoderKeys):
        super().__init__()
        self.enter = Linear(wire, keys.width)
        self.resample = Resample(latents, length, keys.width, 1, keys.heads)
        self.head = Linear(keys.width, vocab_size)

    def forward(self, z_BMW: Tensor) -> Tensor:
        return widen(self.head(self.resample(self.enter(z_BMW))))


def sent(z_BMW: Tensor, way: str) -> dict[str, Tensor]:
    """Returns what is sent of latents."""
    if way == "float16":
        return {"numbers": z_BMW.half()}
    # each latent has its own scale, sent as a float16; the least one avoids a division by zero
    scales = (z_BMW.abs().amax(-1, keepdim=True) / 127).half().clamp_min(2**-24)
    numbers = (z_BMW / scales.to(z_BMW.dtype)).round().clamp(-127, 127)
    return {"numbers": numbers.to(torch.int8), "scales": scales}


def arrived(sent: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns latents of what was sent [B, M, W]."""
    numbers = sent["numbers"].to(dtype)
    return numbers * sent["scales"].to(dtype) if "scales" in sent else numbers


def as_sent(z_BMW: Tensor, way: str) -> Tensor:
    """Returns latents as they arrive. Gradients pass the rounding unchanged."""
    rounded = arrived(sent(z_BMW.detach(), way), z_BMW.dtype)
    return z_BMW + (rounded - z_BMW).detach()


def bytes_sent(latents: int, numbers: int, way: str) -> int:
    """Returns the size of a passage's latents as they are sent."""
    return latents * (2 * numbers if way == "float16" else numbers + SCALE_BYTES)
