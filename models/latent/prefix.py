"""Frozen language models that read latents in place of a text.

An encoder turns the text into a few vectors, and an adapter turns these into a prefix for each
model. Only the encoder and the adapters train.
"""

# B batch, L positions, D width, M latents, W numbers of a latent as it is sent, H heads, K head
# width

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, with_config
from torch import Tensor, nn
from typing_extensions import Doc, TypedDict

from models import halves
from models.latent.generation import LayeredPrefix, answer_logits, generate
from models.layers import (
    Attention,
    Embedding,
    ForwardDtype,
    Linear,
    Past,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    Width,
    gated_width,
    parse_dtype,
    rms_norm,
    widen,
)
from models.targets import GPT, DecoderBlock, load
from utils.command.marks import A_RUN, STRICT, Divides
from utils.errors import ConfigError
from utils.ranks.devices import devices_of, home
from utils.ranks.distributed import Dist
from utils.spec import Spec

# the 256 bytes and BEGIN, which stands before a text (so that no row is empty) and for hidden bytes
BYTES, BEGIN = 257, 256
EPS = 1e-5
LEVELS = {"int8": 127, "int4": 7}  # of a number that is sent
SCALE_BYTES = 2  # a float16 for each latent, when its numbers are rounded to levels


class Gather(nn.Module):
    """Cross-attention from learnt queries to the positions of a text, with or without an MLP."""

    def __init__(self, width: int, heads: int, queries: int, mlp: bool, nearness: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.q_proj, self.kv_proj, self.o_proj = (
            Linear(width, width),
            Linear(width, 2 * width),
            Linear(width, width),
        )
        self.query_norm, self.norm = RMSNorm(width, EPS), RMSNorm(width, EPS)
        self.mlp_norm = RMSNorm(width, EPS) if mlp else None
        self.mlp = SwiGLU(width, gated_width(width, 4.0, 32)) if mlp else None
        self.nearness = nn.Parameter(torch.full((heads,), nearness))

    def forward(self, x_BLD: Tensor, seen_BL: Tensor | None) -> Tensor:
        batch, width = len(x_BLD), x_BLD.shape[-1]
        q_BMD = self.queries.to(x_BLD.dtype).expand(batch, -1, -1)
        query = self._by_head(self.q_proj(self.query_norm(q_BMD)))
        key, value = map(self._by_head, self.kv_proj(self.norm(x_BLD)).split(width, -1))
        mixed_BHMK = halves.attention(query, key, value, self.position_bias(x_BLD, seen_BL))
        x_BMD = q_BMD + self.o_proj(mixed_BHMK.transpose(1, 2).flatten(-2))
        if self.mlp is None or self.mlp_norm is None:
            return x_BMD
        return x_BMD + self.mlp(self.mlp_norm(x_BMD))

    def _by_head(self, x_BLD: Tensor) -> Tensor:
        """Returns [B, L, D] as [B, H, L, K]."""
        return x_BLD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def position_bias(self, x_BLD: Tensor, seen_BL: Tensor | None) -> Tensor:
        """Returns a bias for attention scores [B, H, M, L]: queries are spread evenly over the
        text, and each prefers positions near to it. Heads learn how strongly.
        """
        seen = x_BLD.new_ones(x_BLD.shape[:2], dtype=torch.bool) if seen_BL is None else seen_BL
        count = self.queries.shape[0]
        position_BL = (torch.arange(x_BLD.shape[1], device=x_BLD.device) + 0.5) / seen.sum(
            1, keepdim=True
        )
        query_M = (torch.arange(count, device=x_BLD.device) + 0.5) / count
        distance_BML = (position_BL[:, None] - query_M[None, :, None]) * min(count, x_BLD.shape[1])
        bias = -self.nearness.exp()[None, :, None, None] * distance_BML.square()[:, None]
        return bias.masked_fill(~seen[:, None, None], -torch.inf).to(x_BLD.dtype)


class Encoder(nn.Module):
    """Turns a text's bytes into M latents of W numbers, whose root mean square is 1."""

    def __init__(
        self,
        positions: int,
        latents: int,
        wire: int,
        width: int,
        layers: int,
        heads: int,
        mlp: bool,
        nearness: float,
        dtype: torch.dtype,
    ) -> None:
        """Without `layers` and `mlp`, latents are weighted sums over bytes: a byte contributes the
        same next to any other, so unseen words are spelt like seen ones.
        """
        super().__init__()
        self.dtype = dtype
        self.embed = Embedding(BYTES, width, 1.0)
        self.places = nn.Parameter(torch.randn(positions + 1, width))
        self.rotary = RotaryEmbedding(width // heads, 0, positions + 1, 10000.0, dtype)
        self.layers = nn.ModuleList(
            DecoderBlock(
                width, EPS, Attention(width, heads), SwiGLU(width, gated_width(width, 4.0, 64))
            )
            for _ in range(layers)
        )
        self.gather = Gather(width, heads, latents, mlp, nearness)
        self.norm, self.to_wire = RMSNorm(width, EPS), Linear(width, wire)

    def forward(self, context_BL: Tensor) -> Tensor:
        text_BL = F.pad(context_BL, (1, 0), value=BEGIN)
        seen_BL = text_BL >= 0
        cos, sin = self.rotary()
        x = (self.embed(text_BL.clamp_min(0)) + self.places[: text_BL.shape[1]]).to(self.dtype)
        for block in self.layers:
            x = block(x, (cos[: x.shape[1]], sin[: x.shape[1]]), False, seen_BL[:, None, None])
        x = self.gather(x, seen_BL)
        return rms_norm(self.to_wire(self.norm(x)), EPS)


class Adapter(nn.Module):
    """Turns latents into a model's prefix: vectors as large as its embeddings and, with `deep`,
    keys and values for its layers.
    """

    def __init__(
        self, wire: int, latents: int, spread: int, width: int, net: GPT, deep: bool
    ) -> None:
        """`spread`: positions in the prefix for each latent."""
        super().__init__()
        shape = net.shape
        self.places = nn.Parameter(torch.randn(latents * spread, width))
        self.enter, self.film = Linear(wire, spread * width), Linear(wire, 2 * width, bias=True)
        self.mlp_norm, self.norm = RMSNorm(width, EPS), RMSNorm(width, EPS)
        self.mlp = SwiGLU(width, gated_width(width, 4.0, 32))
        self.leave = Linear(width, shape.hidden_size)
        self.gain = nn.Parameter(torch.zeros(1))
        self.kv_shape = (shape.num_layers, 2, shape.keys, shape.head_width)
        self.deep = (
            Linear(width, shape.num_layers * 2 * shape.keys * self.kv_shape[-1]) if deep else None
        )
        with torch.no_grad():
            self.film.weight.zero_()

    def forward(self, z_BMW: Tensor, size: Tensor) -> tuple[Tensor, list[Past]]:
        """`size`: the root mean square of the model's embeddings."""
        scale, shift = self.film(z_BMW.mean(1, keepdim=True)).chunk(2, -1)
        entered = self.enter(z_BMW).unflatten(-1, (-1, self.places.shape[-1])).flatten(1, 2)
        x = (entered + self.places.to(z_BMW.dtype)) * (1 + scale) + shift
        x = self.norm(x + self.mlp(self.mlp_norm(x)))
        prefix = rms_norm(self.leave(x), EPS) * (size * self.gain.exp()).to(x.dtype)
        if self.deep is None:
            return prefix, []
        # layers, 2, B, H, M, K
        layers = self.deep(x).unflatten(-1, self.kv_shape).permute(2, 3, 0, 4, 1, 5)
        return prefix, [Past(*layer) for layer in layers]


class Gist(nn.Module):
    """Predicts all bytes of a text at once, from its latents alone."""

    def __init__(self, positions: int, latents: int, wire: int, width: int, heads: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(latents, width))
        self.enter, self.gather = Linear(wire, width), Gather(width, heads, positions, True, 1.0)
        self.norm, self.head = RMSNorm(width, EPS), Linear(width, BYTES - 1)

    def forward(self, z_BMW: Tensor) -> Tensor:
        return self.head(
            self.norm(self.gather(self.enter(z_BMW) + self.places.to(z_BMW.dtype), None))
        )


@with_config(STRICT)
class EncoderKeys(TypedDict):
    """Encoder."""

    width: Width
    layers: Annotated[int, Field(ge=0, le=1000)]
    heads: Annotated[PositiveInt, Divides("width")]
    mlp: Annotated[bool, Doc("an MLP follows the attention by which latents gather bytes")]
    nearness: Annotated[
        float,
        Field(ge=-20, le=20),
        Doc(
            "before training: the logarithm of how strongly latents prefer bytes near their "
            "part of the text"
        ),
    ]


class Prefix(nn.Module):
    """The encoder, the adapters and the gist, which train, and the frozen models."""

    sizes: Tensor

    def __init__(
        self,
        spec: Spec,
        models: Annotated[list[str], A_RUN, Doc("the frozen models")],
        latents: Annotated[Width, Doc("vectors for each text")],
        wire: Annotated[Width, Doc("numbers in each vector")],
        encoder: EncoderKeys,
        adapter_width: Annotated[Width, Doc("hidden units of each adapter")],
        spread: Annotated[
            int, Field(ge=1, le=1024), Doc("positions of a model's prefix for each latent")
        ],
        deep: Annotated[
            bool, Doc("adapters also make keys and values for each layer of their model")
        ],
        gist_width: Annotated[Width, Doc("width of the part that predicts texts from latents")],
        send: Annotated[
            Literal["float16", "int8", "int4"], Doc("how vectors are sent, also in training")
        ],
        devices: Annotated[
            int,
            Field(ge=1, le=64),
            Doc(
                "GPUs of each rank: the models are spread over them, and what trains is on the "
                "first"
            ),
        ],
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__()
        self.dtype = parse_dtype(forward_dtype)
        self.latents, self.wire, self.places, self.positions, self.model_specs = (
            latents,
            wire,
            latents * spread,
            spec.seq_len,
            spec.language_models,
        )
        self.frozen = nn.ModuleList()
        for number, (path, model) in enumerate(zip(models, spec.language_models, strict=True)):
            key = f"arch.models[{number}]"
            if model.prompt_len + self.places > model.seq_len:
                raise ConfigError(
                    f"arch.latents={latents}: with a question and room for an answer there are"
                    f" {model.prompt_len + self.places} places, and {key}={path} reads"
                    f" {model.seq_len}; give fewer, or another net"
                )
            part = load(path, model, forward_dtype, (GPT,), "only nets of arch=gpt answer", key)
            # frozen weights are only read: cast them once instead of in every pass
            if self.dtype.itemsize == 2:
                for parameter in part.parameters():
                    parameter.data = parameter.data.to(self.dtype)
            self.frozen.append(part)
        self.encoder = Encoder(spec.seq_len, latents, wire, **encoder, dtype=self.dtype)
        self.adapters = nn.ModuleList(
            Adapter(wire, latents, spread, adapter_width, self.net(number), deep)
            for number in range(len(models))
        )
        sizes = [
            widen(self.net(number).embed_tokens.embedding_weight).square().mean().sqrt()
            for number in range(len(models))
        ]
        # the root mean square of each model's embeddings
        self.register_buffer("sizes", torch.stack(sizes), persistent=False)
        self.send, self.devices = send, devices
        self.gist = Gist(spec.seq_len, latents, wire, gist_width, encoder["heads"])

    def spread_out(self, dist: Dist) -> None:
        """Moves each frozen model to its device. Called on all ranks together."""
        devices, count = devices_of(dist, self.devices), len(self.model_specs)
        for number, frozen in enumerate(self.frozen):
            frozen.to(devices[home(number, count, len(devices))])

    @property
    def sent_bytes(self) -> int:
        """The size of a text's latents as they are sent."""
        return bytes_of(self.latents, self.wire, self.send)

    def net(self, number: int) -> GPT:
        """Returns a frozen model."""
        net = self.frozen[number].net
        assert isinstance(net, GPT)
        return net

    def device_of(self, number: int) -> torch.device:
        """Returns the device that a frozen model is on."""
        return self.net(number).embed_tokens.embedding_weight.device

    def encode(self, context_BL: Tensor) -> Tensor:
        """Returns the latents of each text."""
        return self.encoder(context_BL)

    def transmit(self, z_BMW: Tensor) -> Tensor:
        """Returns latents as they arrive. Gradients pass the rounding unchanged; its own gradient
        is 0.
        """
        return z_BMW + (rounded(z_BMW, self.send) - z_BMW).detach()

    def adapt(self, number: int, z_BMW: Tensor) -> tuple[Tensor, list[Past]]:
        """Returns a model's prefix, and keys and values for its layers if the adapter is deep."""
        return self.adapters[number](z_BMW.to(self.dtype), self.sizes[number])

    def answer_logits(
        self, number: int, before: LayeredPrefix, prompt_BL: Tensor, answer_BA: Tensor
    ) -> Tensor:
        """Returns a model's logits for an answer, on the answer's device. The model may be on
        another.
        """
        where = self.device_of(number)
        logits = answer_logits(
            self.net(number), _on_device(before, where), prompt_BL.to(where), answer_BA.to(where)
        )
        return widen(logits).to(answer_BA.device)

    def generate(self, number: int, before: LayeredPrefix, prompt_BL: Tensor, count: int) -> Tensor:
        """Returns a model's greedy answers."""
        where = self.device_of(number)
        return generate(self.net(number), _on_device(before, where), prompt_BL.to(where), count).to(
            prompt_BL.device
        )


def rounded(z_BMW: Tensor, way: str) -> Tensor:
    """Returns the latents as they arrive, rounded."""
    if way == "float16":
        return z_BMW.half().to(z_BMW.dtype)
    most = LEVELS[way]
    scale = (z_BMW.abs().amax(-1, keepdim=True) / most).half().to(z_BMW.dtype).clamp_min(2**-24)
    return (z_BMW / scale).round().clamp(-most, most) * scale


def bytes_of(latents: int, numbers: int, way: str) -> int:
    """Returns the size in bytes of so many latents, each of so many numbers."""
    if way == "float16":
        return 2 * latents * numbers
    bits = 8 if way == "int8" else 4
    return latents * (-(-numbers * bits // 8) + SCALE_BYTES)


def _on_device(before: LayeredPrefix, where: torch.device) -> LayeredPrefix:
    prefix, seen = before
    return None if prefix is None else prefix.to(where), [layer.to(where) for layer in seen]
