"""The induction-head task: a net of two layers of attention without MLPs, and its objective.

A head of the first layer notes which token precedes each token, and one of the second finds the
place after the last token's earlier occurrence.
"""

# B batch, L positions, D width, H heads, K width of a head, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from contract import IGNORE, Batch, Carry, Context, Objective, Prediction, Spec, StepOut
from models.layers import (
    Embedding,
    ForwardDtype,
    Layers,
    Linear,
    Width,
    check_memory,
    parse_dtype,
    widen,
)
from utils.errors import ConfigError


class InductionHeads(nn.Module):
    """Adds layers of causal attention to embedded tokens, and reads the next token from the sum.

    There are no norms, biases or MLPs.
    """

    def __init__(
        self,
        spec: Spec,
        hidden_size: Width,
        num_heads: PositiveInt,
        num_layers: Layers,
        forward_dtype: ForwardDtype,
    ) -> None:
        super().__init__()
        # puzzles have tokens, too, but no next one to predict
        if not (spec.vocab_size and spec.seq_len) or hasattr(spec, "table_rows"):
            raise ConfigError(
                "arch=induction needs tokens, and the data has none; use data=induction"
            )
        if hidden_size % (2 * num_heads):
            raise ConfigError(
                f"arch.hidden_size={hidden_size} is not a multiple of two times"
                f" arch.num_heads={num_heads}"
            )
        check_memory(hidden_size * (2 * spec.vocab_size + 4 * num_layers * hidden_size))
        self.dtype = parse_dtype(forward_dtype)
        self.embed_tokens = Embedding(spec.vocab_size, hidden_size, 1.0)
        positions_LD = sinusoids(spec.seq_len, hidden_size).to(self.dtype)
        self.layers = nn.ModuleList(
            AttentionAlone(hidden_size, num_heads, positions_LD) for _ in range(num_layers)
        )
        self.lm_head = Linear(hidden_size, spec.vocab_size)

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """Returns the sum of the embeddings and of what the layers add."""
        x_BLD = self.embed_tokens(tokens_BL).to(self.dtype)
        for layer in self.layers:
            x_BLD = x_BLD + layer(x_BLD)
        return x_BLD

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns scores of the next token, in float32 at least."""
        return widen(self.lm_head(hidden))


class AttentionAlone(nn.Module):
    """Causal attention in which positions are added to queries and keys, but not to values
    (Press et al. 2020, arXiv 2012.15832).
    """

    positions_LD: Tensor

    def __init__(self, width: int, heads: int, positions_LD: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = Linear(width, width), Linear(width, width)
        self.v_proj, self.o_proj = Linear(width, width), Linear(width, width)
        self.register_buffer("positions_LD", positions_LD, persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        # values without positions: what is copied does not depend on its place
        positions_LD = self.positions_LD[: x_BLD.shape[1]].to(x_BLD.dtype)
        q, k = self.q_proj(x_BLD) + positions_LD, self.k_proj(x_BLD) + positions_LD
        q_BHLK, k_BHLK, v_BHLK = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, self.v_proj(x_BLD))
        )
        y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        return self.o_proj(y_BHLK.transpose(1, 2).flatten(-2))


def sinusoids(length: int, width: int) -> Tensor:
    """Returns sines and cosines of positions [L, D], in turn, at rates from 1 down to almost
    1/10000.
    """
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


class Recall(Objective):
    """Sums the cross entropy of the token that follows each text."""

    costs = frozenset({"loss"})
    model: InductionHeads

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        logits_BV = self._logits(batch)
        nats = F.cross_entropy(logits_BV, batch["answer"].long(), reduction="sum")
        return StepOut(nats, torch.full((), len(logits_BV), device=nats.device), {})

    def predict(self, batch: Batch) -> Prediction:
        """Reports the share of tokens that are the likeliest, and the cross entropy."""
        logits_BV, answer_B = self._logits(batch), batch["answer"].long()
        counted_B = batch["labels"][:, -1] != IGNORE
        nats_B = F.cross_entropy(logits_BV, answer_B, reduction="none")
        right_B = logits_BV.argmax(-1) == answer_B
        sums = {"accuracy": right_B, "loss": nats_B}
        count = counted_B.sum()
        return Prediction({name: ((of_B * counted_B).sum(), count) for name, of_B in sums.items()})

    def _logits(self, batch: Batch) -> Tensor:
        # only the position after the last token is asked
        return self.model.logits(self.model(batch["inputs"])[:, -1])
