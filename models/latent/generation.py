"""Makes a frozen language model answer a question after a prefix of vectors or a text."""

# B batch, L positions, D width, V vocabulary, A tokens of an answer, P places of a prefix

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.layers import Past
from models.targets import GPT

# vectors before the tokens [B, P, D], and the keys and values of each layer; both may be missing
Before = tuple[Tensor | None, Sequence[Past]]
NOTHING: Before = (None, ())


def concatenate_ragged(*parts_BL: Tensor, at_end: bool = False) -> tuple[Tensor, Tensor]:
    """Concatenates parts, each padded by negative numbers, row by row without the padding between.

    Returns the rows, padded on the right (or with `at_end` on the left), and their lengths.
    """
    tokens_BL = torch.cat(parts_BL, 1)
    there_BL = tokens_BL >= 0
    order_BL = (there_BL if at_end else ~there_BL).to(torch.uint8).argsort(dim=1, stable=True)
    return tokens_BL.gather(1, order_BL), there_BL.sum(1)


def begin_tokens(begin: int, like: Tensor) -> Tensor:
    """Returns a column with the begin token for every row of `like`."""
    return torch.full((len(like), 1), begin, dtype=like.dtype, device=like.device)


def answer_logits(net: GPT, before: Before, said_BL: Tensor, answer_BA: Tensor) -> Tensor:
    """Returns the logits for each token of an answer [B, A, V], given the prompt and the tokens
    before it.

    Each row of `before` may stand before several rows of `said_BL`, which follow one another; the
    prefix is then read once for all of them.
    """
    tokens_BL, lengths_B = concatenate_ragged(said_BL, answer_BA)
    first, seen = _read_prefix(net, before, len(tokens_BL))
    x_BLD = net.embed(tokens_BL.clamp_min(0))
    places_L = torch.arange(first, first + x_BLD.shape[1], device=said_BL.device)
    hidden_BLD = net.read(x_BLD, places_L[None], _behind(seen, x_BLD), seen or None)
    places_BA = (lengths_B - (answer_BA >= 0).sum(1) - 1)[:, None] + torch.arange(
        answer_BA.shape[1], device=said_BL.device
    )
    places_BA = places_BA.clamp(0, x_BLD.shape[1] - 1)
    return net.logits(
        hidden_BLD.gather(1, places_BA[..., None].expand(-1, -1, hidden_BLD.shape[-1]))
    )


def _read_prefix(net: GPT, before: Before, rows: int) -> tuple[int, list[Past]]:
    """Returns the length of the prefix, and the keys and values that so many rows look back at."""
    prefix, seen = before
    first = 0
    if prefix is not None:
        first = prefix.shape[1]
        behind = _behind(seen, prefix)
        seen = [Past(layer.key, layer.value) for layer in seen] or [Past() for _ in net.blocks]
        net.read(prefix, None, behind, seen)
    times = rows // len(seen[0].key) if seen and seen[0].key is not None else 1
    return first, [layer.repeat(times) for layer in seen]


def generate(net: GPT, before: Before, said_BL: Tensor, most: int) -> Tensor:
    """Returns a greedy continuation [B, most]."""
    prefix, seen = before
    tokens_BL, lengths_B = concatenate_ragged(said_BL, at_end=True)
    x_BLD, there_BL = net.embed(tokens_BL.clamp_min(0)), tokens_BL >= 0
    first = 0
    if prefix is not None:
        first = prefix.shape[1]
        x_BLD, there_BL = (
            torch.cat((prefix, x_BLD), 1),
            torch.cat((there_BL.new_ones(len(there_BL), first), there_BL), 1),
        )
    if seen:
        there_BL = torch.cat((there_BL.new_ones(len(there_BL), seen[0].length), there_BL), 1)
    length, deep = x_BLD.shape[1], there_BL.shape[1] - x_BLD.shape[1]
    places_BL = (there_BL[:, deep:].cumsum(1) - 1).clamp_min(0)
    square = torch.ones(length, deep + length, dtype=torch.bool, device=x_BLD.device)
    # what is missing sees itself: else it would divide nothing by nothing
    itself = square.tril(deep) & square.triu(deep)
    sees = ((square.tril(deep) & there_BL[:, None]) | itself)[:, None]
    past = [Past(layer.key, layer.value) for layer in seen] or [Past() for _ in net.blocks]
    made: list[Tensor] = []
    for step in range(most):
        hidden_BD = net.read(x_BLD, places_BL, sees, past)[:, -1]
        new_B = net.logits(hidden_BD).argmax(-1)
        made.append(new_B)
        x_BLD, places_BL = net.embed(new_B[:, None]), (first + lengths_B + step)[:, None]
        there_BL = torch.cat((there_BL, there_BL.new_ones(len(there_BL), 1)), 1)
        sees = there_BL[:, None, None]
    return torch.stack(made, 1)


def _behind(seen: Sequence[Past], x_BLD: Tensor) -> Tensor | None:
    """At what each position looks that stands behind what layers have seen already."""
    if not seen:
        return None
    length, before = x_BLD.shape[1], seen[0].length
    return torch.ones(length, before + length, dtype=torch.bool, device=x_BLD.device).tril(before)[
        None, None
    ]
