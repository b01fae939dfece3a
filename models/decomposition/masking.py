"""Masks of components, and the errors of a net's outputs under these masks."""

# B batch, Q passes in which all matrices are masked, K components of all matrices, S matrices, …
# positions, if there are any

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contract import Noise
from models.decomposition.components import Components, Mask

# called with outputs and the target's outputs; returns an error for each row
Measure = Callable[[Tensor, Tensor], Tensor]


class Masks:
    """The masks of Q passes: one for each component [B, Q, …, K], and optionally one for the rest
    of each matrix, W - V U [B, Q, …, S].
    """

    def __init__(self, components: Tensor, rest: Tensor | None = None) -> None:
        self.components, self.rest = components, rest

    @classmethod
    def between(cls, gates: Tensor, sources: Tensor) -> Masks:
        """Returns masks between gates [B, …, K] and 1: gate + (1 - gate) × source. `sources`
        [B, Q, …, K or K + S] are from 0 to 1; those beyond K are the masks of the rests.
        """
        gates, count = gates.unsqueeze(1), gates.shape[-1]
        components = torch.addcmul(gates, 1 - gates, sources[..., :count])
        return cls(components, sources[..., count:] if sources.shape[-1] > count else None)

    def of_matrix(self, model: Components, number: int, passes: slice | int = slice(None)) -> Mask:
        """Returns the masks of one matrix in these passes."""
        components = self.components[:, passes][..., model.columns(number)]
        return Mask(
            components,
            None if self.rest is None else self.rest[:, passes][..., number : number + 1],
        )


def route(masks: Masks, model: Components, noise: Noise, batch: int, rows: Tensor | None) -> Masks:
    """Keeps the masks of some matrices in each row, and leaves the other matrices as they are.

    Their number is drawn evenly from one to all. `rows` are the indices of these rows in the batch
    of size `batch`, if they are not all.
    """
    shape, matrices = (batch, 1, *masks.components.shape[2:-1]), len(model.names)
    drawn = noise.uniform("subset", (*shape, matrices), rows)
    most = (noise.uniform("subset size", shape, rows) * matrices).floor()  # 0 … S - 1
    chosen = drawn.argsort(-1).argsort(-1) <= most.unsqueeze(-1)
    masked = chosen.to(masks.components.dtype)
    whole = 1 - masked  # all components, and the rest
    kept = model.for_each_component(masked) * masks.components
    components = kept + model.for_each_component(whole)
    return Masks(components, whole if masks.rest is None else masked * masks.rest + whole)


def concat(parts: Sequence[Masks]) -> Masks:
    """Concatenates passes. All or none of the masks have a rest."""
    rests = [part.rest for part in parts if part.rest is not None]
    components = torch.cat([part.components for part in parts], 1)
    return Masks(components, torch.cat(rests, 1) if rests else None)


def errors(
    model: Components,
    x: Tensor,
    documents: Tensor | None,
    target_out: Tensor,
    masks: Masks,
    measure: Measure,
    one_by_one: Masks | None = None,
) -> list[Tensor]:
    """Returns the error of each row in each pass of `masks`. After these come, with the masks of
    `one_by_one`, which have one pass, the errors with one matrix masked at a time.
    """
    if not model.predicts_tokens:
        return _errors_in_one_pass(model, x, target_out, masks, measure, one_by_one)
    everywhere = range(len(model.names))

    def of_pass(chosen: Masks, q: int, numbers: range) -> Tensor:
        instead = {number: partial(_masked_output, model, chosen, q, number) for number in numbers}
        return measure(model.run_with(x, instead, documents), target_out)

    passes = [of_pass(masks, q, everywhere) for q in range(masks.components.shape[1])]
    if one_by_one is not None:
        passes += [of_pass(one_by_one, 0, range(i, i + 1)) for i in everywhere]
    return passes


def _masked_output(model: Components, masks: Masks, q: int, number: int, given: Tensor) -> Tensor:
    """Returns what a masked matrix computes in one of the passes."""
    mask = masks.of_matrix(model, number, slice(q, q + 1))
    of_pass: Any = (None if each is None else each.squeeze(1) for each in mask)
    return model.multiply(number, given, Mask(*of_pass))


def _errors_in_one_pass(
    model: Components,
    x: Tensor,
    target_out: Tensor,
    masks: Masks,
    measure: Measure,
    one_by_one: Masks | None,
) -> list[Tensor]:
    """Computes all passes as one, in a dimension before the batch. Up to the first masked matrix
    they are the same, and that dimension is 1.
    """
    Q, S = masks.components.shape[1], len(model.names)
    whole = masks if one_by_one is None else concat([masks, one_by_one])

    def compute(number: int, given: Tensor) -> Tensor:
        mask = whole.of_matrix(model, number)
        passes_first: Any = (None if each is None else each.transpose(0, 1) for each in mask)
        mask = Mask(*passes_first)
        if one_by_one is None:
            return model.multiply(number, given, mask)
        same, own = len(given) == 1, Q + number
        y = model.multiply(
            number, given if same else torch.cat((given[:Q], given[own : own + 1])), mask
        )
        others = model.original(number, given if same else given[Q:])  # one in S goes unused
        others = others.expand(S, *others.shape[1:])
        return torch.cat((y[:Q], others[:number], y[Q:], others[number + 1 :]))

    out = model.run_with(x.unsqueeze(0), {number: partial(compute, number) for number in range(S)})
    return list(measure(out, target_out).unbind())
