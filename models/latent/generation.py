"""Makes a frozen language model answer a question after a prefix of vectors or a text."""

# B batch, L positions, D width, V vocabulary, A tokens of an answer, P positions of a prefix

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.layers import Past
from models.targets import GPT

# vectors before the prompt [B, P, D], and keys and values of each layer; both may be missing
LayeredPrefix = tuple[Tensor | None, Sequence[Past]]
NO_PREFIX: LayeredPrefix = (None, ())


def concatenate_ragged(*parts_BL: Tensor, at_end: bool = False) -> tuple[Tensor, Tensor]:
    """Concatenates the parts of each row and moves their padding (negative numbers) to the right,
    or with `at_end` to the left.

    Returns the rows and their lengths.
    """
    tokens_BL = torch.cat(parts_BL, 1)
    present_BL = tokens_BL >= 0
    order_BL = (present_BL if at_end else ~present_BL).to(torch.uint8).argsort(dim=1, stable=True)
    return tokens_BL.gather(1, order_BL), present_BL.sum(1)


def begin_tokens(begin: int, like: Tensor) -> Tensor:
    """Returns a column with the begin token for every row of `like`."""
    return torch.full((len(like), 1), begin, dtype=like.dtype, device=like.device)


def answer_logits(net: GPT, before: LayeredPrefix, prompt_BL: Tensor, answer_BA: Tensor) -> Tensor:
    """Returns the logits of each token of an answer [B, A, V], given the prompt and the answer's
    tokens before it.

    A row of `before` may serve several consecutive rows of `prompt_BL`; it is then read once.
    """
    tokens_BL, lengths_B = concatenate_ragged(prompt_BL, answer_BA)
    first, past_layers = _read_prefix(net, before, len(tokens_BL))
    x_BLD = net.embed(tokens_BL.clamp_min(0))
    positions_L = torch.arange(first, first + x_BLD.shape[1], device=prompt_BL.device)
    hidden_BLD = net.read(
        x_BLD, positions_L[None], _mask_after(past_layers, x_BLD), past_layers or None
    )
    positions_BA = (lengths_B - (answer_BA >= 0).sum(1) - 1)[:, None] + torch.arange(
        answer_BA.shape[1], device=prompt_BL.device
    )
    positions_BA = positions_BA.clamp(0, x_BLD.shape[1] - 1)
    return net.logits(
        hidden_BLD.gather(1, positions_BA[..., None].expand(-1, -1, hidden_BLD.shape[-1]))
    )


def _read_prefix(net: GPT, before: LayeredPrefix, rows: int) -> tuple[int, list[Past]]:
    """Returns the length of the prefix, and the keys and values that `rows` prompts attend to."""
    prefix, past_layers = before
    first = 0
    if prefix is not None:
        first = prefix.shape[1]
        mask = _mask_after(past_layers, prefix)
        past_layers = [Past(layer.key, layer.value) for layer in past_layers] or [
            Past() for _ in net.blocks
        ]
        net.read(prefix, None, mask, past_layers)
    copies = (
        rows // len(past_layers[0].key) if past_layers and past_layers[0].key is not None else 1
    )
    return first, [layer.repeat(copies) for layer in past_layers]


def generate(net: GPT, before: LayeredPrefix, prompt_BL: Tensor, count: int) -> Tensor:
    """Returns the greedy continuation of each prompt, `count` tokens long [B, count]."""
    prefix, past_layers = before
    tokens_BL, lengths_B = concatenate_ragged(prompt_BL, at_end=True)
    x_BLD, present_BL = net.embed(tokens_BL.clamp_min(0)), tokens_BL >= 0
    first = 0
    if prefix is not None:
        first = prefix.shape[1]
        x_BLD, present_BL = (
            torch.cat((prefix, x_BLD), 1),
            torch.cat((present_BL.new_ones(len(present_BL), first), present_BL), 1),
        )
    if past_layers:
        present_BL = torch.cat(
            (present_BL.new_ones(len(present_BL), past_layers[0].length), present_BL), 1
        )
    length, deep = x_BLD.shape[1], present_BL.shape[1] - x_BLD.shape[1]
    positions_BL = (present_BL[:, deep:].cumsum(1) - 1).clamp_min(0)
    square = torch.ones(length, deep + length, dtype=torch.bool, device=x_BLD.device)
    # padding attends to itself; a softmax over nothing would be NaN
    diagonal = square.tril(deep) & square.triu(deep)
    mask = ((square.tril(deep) & present_BL[:, None]) | diagonal)[:, None]
    past = [Past(layer.key, layer.value) for layer in past_layers] or [Past() for _ in net.blocks]
    generated: list[Tensor] = []
    for step in range(count):
        hidden_BD = net.read(x_BLD, positions_BL, mask, past)[:, -1]
        new_B = net.logits(hidden_BD).argmax(-1)
        generated.append(new_B)
        x_BLD, positions_BL = net.embed(new_B[:, None]), (first + lengths_B + step)[:, None]
        present_BL = torch.cat((present_BL, present_BL.new_ones(len(present_BL), 1)), 1)
        mask = present_BL[:, None, None]
    return torch.stack(generated, 1)


def _mask_after(past_layers: Sequence[Past], x_BLD: Tensor) -> Tensor | None:
    """Returns the mask [1, 1, L, past + L] for positions that follow keys and values; None if there
    are none, and the mask is the usual one.
    """
    if not past_layers:
        return None
    length, before = x_BLD.shape[1], past_layers[0].length
    return torch.ones(length, before + length, dtype=torch.bool, device=x_BLD.device).tril(before)[
        None, None
    ]
