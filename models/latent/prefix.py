"""A frozen language model that reads a few vectors in place of the tokens of a passage.

Each vector is the embedding of one of the passage's last tokens, plus a linear map, at first zero,
of the model's state there. So training begins where the model reads the last tokens themselves.
"""

# B batch, L positions, M latents, D width, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import Doc

from contract import Spec
from models.language.targets import GPT, load_frozen
from models.layers import ForwardDtype, Linear, parse_dtype, widen
from utils.command.marks import A_RUN, MAY_CHANGE
from utils.errors import ConfigError


class Prefix(nn.Module):
    """A frozen model, and a map from its states to its embeddings, which trains."""

    size: Tensor

    def __init__(
        self,
        spec: Spec,
        target: Annotated[str | None, A_RUN, MAY_CHANGE, Doc("the frozen model")],
        passage: Annotated[
            PositiveInt, Doc("tokens that latents replace; the rest of data.seq_len is predicted")
        ],
        latents: Annotated[PositiveInt, Doc("vectors for each passage")],
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__()
        self.dtype = parse_dtype(forward_dtype)
        self.passage, self.latents = passage, latents
        if passage >= spec.seq_len:
            raise ConfigError(
                f"arch.passage={passage}: leaves none of data.seq_len={spec.seq_len} to predict;"
                " give less"
            )
        if latents > passage:
            raise ConfigError(f"arch.latents={latents}: must not exceed arch.passage={passage}")
        room = replace(spec, seq_len=spec.seq_len + latents)
        self.target = load_frozen(
            target, room, forward_dtype, (GPT,), "only nets of arch=gpt read latents"
        )
        net, width = self.net, self.net.shape.hidden_size
        # steps of the map are as large as the model's embeddings
        size = widen(net.embed_tokens.embedding_weight).square().mean().sqrt()
        self.register_buffer("size", size, persistent=False)
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
        x_BLD = self.net.embed(passage_BL)
        states_BMD = self.net.read(x_BLD)[:, -self.latents :]
        return x_BLD[:, -self.latents :] + self.size.to(self.dtype) * self.map(states_BMD)
