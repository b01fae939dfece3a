"""A frozen language model that reads a few vectors in place of the tokens of a passage.

An encoder, which begins as a copy of the model, reads the passage. Its states are made k vectors,
by the mean of each of k equal pieces or by k learnt tokens behind the passage, and a linear map
turns these into a prefix of the model's stream. The model itself never trains.
"""

# B batch, L positions, M latents, D width, V vocabulary

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import Doc

from models.layers import ForwardDtype, Linear, Width, parse_dtype, widen
from models.targets import GPT, load
from utils.command.marks import A_RUN
from utils.errors import ConfigError
from utils.spec import Spec


class Prefix(nn.Module):
    """The encoder and the map to a prefix, which train, and the frozen model."""

    def __init__(
        self,
        spec: Spec,
        target: Annotated[str | None, A_RUN, Doc("the frozen model")],
        passage: Annotated[
            PositiveInt, Doc("tokens that latents replace; the rest of data.seq_len is predicted")
        ],
        latents: Annotated[Width, Doc("vectors for each passage")],
        pool: Annotated[
            Literal["mean", "tokens", "none"],
            Doc(
                "mean: of the encoder's states in equal pieces of the passage; tokens: states of"
                " learnt tokens behind the passage; none: learnt vectors, the same for all passages"
            ),
        ],
        encoder: Annotated[
            Literal["trained", "frozen"],
            Doc("trained: begins as a copy of the model; frozen: the model itself"),
        ],
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__()
        self.dtype = parse_dtype(forward_dtype)
        self.passage, self.latents, self.pool = passage, latents, pool
        if passage >= spec.seq_len:
            raise ConfigError(
                f"arch.passage={passage}: leaves none of data.seq_len={spec.seq_len} to predict;"
                " give less"
            )
        if passage % latents:
            raise ConfigError(
                f"arch.latents={latents}: must divide arch.passage={passage} into equal pieces"
            )
        self.target = load(
            target,
            replace(spec, seq_len=spec.seq_len + latents),
            forward_dtype,
            (GPT,),
            "only nets of arch=gpt read latents",
        )
        net, width = self.net, self.net.shape.hidden_size
        self.encoder: GPT | None = None
        if encoder == "trained" and pool != "none":
            self.encoder = copy.deepcopy(net).requires_grad_(True)
            self.encoder.lm_head = None
        size = widen(net.embed_tokens.embedding_weight).square().mean().sqrt()
        self.tokens = nn.Parameter(torch.randn(latents, width) * size) if pool != "mean" else None
        self.leave = Linear(width, width)
        # frozen weights are only read: cast them once instead of in every pass
        if self.dtype.itemsize == 2:
            for parameter in self.target.parameters():
                parameter.data = parameter.data.to(self.dtype)

    @property
    def net(self) -> GPT:
        """The frozen model."""
        assert isinstance(self.target.net, GPT)
        return self.target.net

    def forward(self, passage_BL: Tensor, text_BL: Tensor) -> Tensor:
        """Returns logits of the token after each of the text, read after the passage's latents."""
        return self.read(self.encode(passage_BL), text_BL)

    def read(self, prefix_BMD: Tensor, text_BL: Tensor) -> Tensor:
        """Returns the model's logits in a text after a prefix [B, L, V]."""
        x_BLD = torch.cat((prefix_BMD, self.net.embed(text_BL)), 1)
        return self.net.logits(self.net.read(x_BLD)[:, prefix_BMD.shape[1] :])

    def encode(self, passage_BL: Tensor) -> Tensor:
        """Returns the prefix of each passage [B, M, D]."""
        reader = self.encoder or self.net
        x_BLD = reader.embed(passage_BL)
        if self.tokens is None:
            return self.leave(pieces(reader.read(x_BLD), self.latents))
        states_BMD = self.tokens.to(self.dtype).expand(len(x_BLD), -1, -1)
        if self.pool == "tokens":
            states_BMD = reader.read(torch.cat((x_BLD, states_BMD), 1))[:, -self.latents :]
        return self.leave(states_BMD)


def pieces(x_BLD: Tensor, count: int) -> Tensor:
    """Returns the mean of each of so many equal pieces of rows."""
    return x_BLD.unflatten(1, (count, -1)).mean(2)
