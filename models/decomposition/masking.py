"""Masks of components, and what a net computes under them."""

# B batch, Q passes in which all matrices are masked, K components of all matrices, S matrices, …
# positions, if there are any

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from contract import Noise
from models.decomposition.components import Components, Mask


class Masks:
    """The masks of Q passes: one for each component [B, Q, …, K], and optionally one for the rest
    of each matrix, W - V U [B, Q, …, S].
    """

    def __init__(self, components: Tensor, rest: Tensor | None = None) -> None:
        self.components, self.rest = components, rest

    @classmethod
    def between(cls, gates: Tensor, sources: Tensor) -> Masks:
        """Returns masks between gates [B, …, K] and 1: gate + (1 - gate) × source. `sources`
        [B, Q, …, K + S] are from 0 to 1; the last S are the masks of the rests.
        """
        gates, count = gates.unsqueeze(1), gates.shape[-1]
        return cls(torch.addcmul(gates, 1 - gates, sources[..., :count]), sources[..., count:])

    def of_matrix(self, model: Components, number: int, passes: slice | int = slice(None)) -> Mask:
        """Returns the masks of one matrix in these passes; in a single one without a dimension for
        passes.
        """
        components = self.components[:, passes][..., model.columns(number)]
        rest = None if self.rest is None else self.rest[:, passes][..., number : number + 1]
        return Mask(components, rest)


def route(masks: Masks, model: Components, noise: Noise, batch: int, rows: Tensor | None) -> Masks:
    """Keeps the masks of some matrices in each row, and leaves the other matrices as they are.

    Their number is drawn evenly from one to all. `rows` are the indices of these rows in the batch
    of size `batch`, if they are not all.
    """
    # draws are for the whole batch, of which only some rows may be computed
    shape, matrices = (batch, 1, *masks.components.shape[2:-1]), len(model.names)
    drawn = noise.uniform("subset", (*shape, matrices), rows)
    most = (noise.uniform("subset size", shape, rows) * matrices).floor()  # 0 … S - 1
    chosen = drawn.argsort(-1).argsort(-1) <= most.unsqueeze(-1)  # by the rank of each draw
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


def masked_outputs(
    model: Components,
    x: Tensor,
    documents: Tensor | None,
    masks: Masks,
    one_by_one: Masks | None = None,
) -> Iterator[Tensor]:
    """Yields the net's outputs [passes, B, …], some passes at a time: in each pass of `masks`, then
    with one matrix masked at a time, by the only pass of `one_by_one`.
    """
    if not model.predicts_tokens:
        yield _all_passes_at_once(model, x, masks, one_by_one)
        return
    # a language model's activations are large: one pass at a time, and one matrix in each of the
    # last
    everywhere = range(len(model.names))
    for number in range(masks.components.shape[1]):
        yield _one_pass(model, x, documents, masks, number, everywhere)
    if one_by_one is not None:
        for matrix in everywhere:
            yield _one_pass(model, x, documents, one_by_one, 0, [matrix])


def _one_pass(
    model: Components,
    x: Tensor,
    documents: Tensor | None,
    masks: Masks,
    number: int,
    matrices: Sequence[int],
) -> Tensor:
    """Returns the outputs [1, B, …] with the masks of one pass on these matrices."""

    def masked(matrix: int, matrix_input: Tensor) -> Tensor:
        return model.multiply(matrix, matrix_input, masks.of_matrix(model, matrix, number))

    instead = {matrix: partial(masked, matrix) for matrix in matrices}
    return model.run_with(x, instead, documents).unsqueeze(0)


def _all_passes_at_once(
    model: Components, x: Tensor, masks: Masks, one_by_one: Masks | None
) -> Tensor:
    """Computes all passes as one, in a dimension before the batch: Q passes of `masks`, then S in
    each of which one of the S matrices is masked. Up to the first masked matrix, passes are the
    same, and that dimension is 1.
    """
    # toy models are small, so that one large product is faster than many passes
    Q, S = masks.components.shape[1], len(model.names)
    of_all = masks if one_by_one is None else concat([masks, one_by_one])

    def compute(matrix: int, matrix_input: Tensor) -> Tensor:
        mask = of_all.of_matrix(model, matrix)
        rest = None if mask.rest is None else mask.rest.transpose(0, 1)
        mask = Mask(mask.components.transpose(0, 1), rest)
        if one_by_one is None:
            return model.multiply(matrix, matrix_input, mask)
        # this matrix is masked in the first Q passes, and in its own one
        to_mask = to_leave = matrix_input
        if len(matrix_input) > 1:
            its_own = Q + matrix
            to_mask = torch.cat((matrix_input[:Q], matrix_input[its_own : its_own + 1]))
            to_leave = matrix_input[Q:]
        masked = model.multiply(matrix, to_mask, mask)
        # in the other S - 1 passes; one of these S goes unused
        left = model.original(matrix, to_leave)
        left = left.expand(S, *left.shape[1:])
        return torch.cat((masked[:Q], left[:matrix], masked[Q:], left[matrix + 1 :]))

    instead = {matrix: partial(compute, matrix) for matrix in range(S)}
    return model.run_with(x.unsqueeze(0), instead)
