"""A frozen language model that reads a few vectors in place of the tokens of a passage.

Each vector is one of the model's embeddings, or a mean of some, plus a linear map, at first zero,
of an encoder's states there. So training begins where the model reads its own embeddings: with
`pool=last`, the last tokens of the passage.
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

from models.layers import ForwardDtype, Linear, parse_dtype, widen
from models.targets import GPT, load
from utils.command.marks import A_RUN
from utils.errors import ConfigError
from utils.spec import Spec


class Prefix(nn.Module):
    """A frozen model with its encoder, and the map between them, which trains."""

    size: Tensor

    def __init__(
        self,
        spec: Spec,
        target: Annotated[str | None, A_RUN, Doc("the frozen model")],
        passage: Annotated[
            PositiveInt, Doc("tokens that latents replace; the rest of data.seq_len is predicted")
        ],
        latents: Annotated[PositiveInt, Doc("vectors for each passage")],
        pool: Annotated[
            Literal["last", "equal", "tokens"],
            Doc(
                "last: latents begin as the passage's last tokens; equal: as the means of equal "
                "pieces of it; tokens: as learnt tokens behind it"
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
        room = replace(spec, seq_len=spec.seq_len + latents)
        self.target = load(
            target, room, forward_dtype, (GPT,), "only nets of arch=gpt read latents"
        )
        net, width = self.net, self.net.shape.hidden_size
        self.encoder: GPT | None = None
        if encoder == "trained":
            self.encoder = copy.deepcopy(net).requires_grad_(True)
            self.encoder.lm_head = None
        # steps of the map are as large as the model's embeddings
        size = widen(net.embed_tokens.embedding_weight).square().mean().sqrt()
        self.register_buffer("size", size, persistent=False)
        self.tokens = nn.Parameter(torch.randn(latents, width) * size) if pool == "tokens" else None
        self.map = Linear(width, width)
        nn.init.zeros_(self.map.weight)
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
        """Returns the latents of each passage [B, M, D]."""
        encoder = self.encoder or self.net
        x_BLD = encoder.embed(passage_BL)
        if self.tokens is None:
            start_BMD = self.pooled(self.net.embed(passage_BL))
            states_BMD = self.pooled(encoder.read(x_BLD))
        else:
            start_BMD = self.tokens.to(self.dtype).expand(len(x_BLD), -1, -1)
            states_BMD = encoder.read(torch.cat((x_BLD, start_BMD), 1))[:, -self.latents :]
        return start_BMD + self.size.to(self.dtype) * self.map(states_BMD)

    def pooled(self, x_BLD: Tensor) -> Tensor:
        """Returns the last of a passage's vectors, or means of equal pieces [B, M, D]."""
        return x_BLD[:, -self.latents :] if self.pool == "last" else means(x_BLD, self.latents)


def means(x_BLD: Tensor, count: int) -> Tensor:
    """Returns the mean of each of `count` equal pieces."""
    return x_BLD.unflatten(1, (count, -1)).mean(2)
