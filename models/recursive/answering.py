"""Answers puzzles with a recursive net: for how many steps it thinks about each."""

# P puzzles of a batch, N of them still in the batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.objective import Batch
from models.recursive.recursion import RecursiveNet

# each batch size is compiled separately, so there are few sizes, each half of the one before
HALVINGS = 3


def answers_by_step(model: RecursiveNet, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, after each thinking step, the token logits and halting logits of every puzzle, and
    the number of steps that it has taken.

    With `eval_halt`, a puzzle leaves the batch with its answer when the net wants to halt and has
    given the same answer one step before; the net alone often wants to halt a step too early. There
    are no more steps once all puzzles have left.
    """
    sizes, inputs = model.sizes, batch["inputs"]
    rows = model.puzzle_rows(batch["puzzle_identifiers"])
    state, weights = model.fresh_state(*inputs.shape), model.weights_in_dtype()
    steps_P = torch.zeros_like(batch["puzzle_identifiers"])
    puzzle_N = torch.arange(len(steps_P), device=steps_P.device)
    going_N = torch.ones_like(steps_P, dtype=torch.bool)
    answer_NT = torch.full_like(inputs, -1)
    logits_PTV = q_P2 = None
    for _ in range(sizes.halt_max_steps):
        state, logits_NTV, q_N2 = model(state, inputs, rows, weights)
        if logits_PTV is None or q_P2 is None or not sizes.eval_halt:
            logits_PTV, q_P2 = logits_NTV, q_N2
        else:
            logits_PTV = logits_PTV.index_copy(0, puzzle_N[going_N], logits_NTV[going_N])
            q_P2 = q_P2.index_copy(0, puzzle_N[going_N], q_N2[going_N])
        steps_P = steps_P.index_add(0, puzzle_N, going_N.to(steps_P.dtype))
        yield logits_PTV, q_P2, steps_P
        if sizes.eval_halt:
            answer_NT, before_NT = logits_NTV.argmax(-1), answer_NT
            going_N = going_N & ~(model.wants_to_halt(q_N2) & (answer_NT == before_NT).all(-1))
            stay = _rows_to_keep(going_N, len(steps_P), model.compiled)
            if not len(stay):
                return
            if len(stay) < len(going_N):
                puzzle_N, going_N, answer_NT = puzzle_N[stay], going_N[stay], answer_NT[stay]
                state, inputs = (state[0][stay], state[1][stay]), inputs[stay]
                rows = None if rows is None else rows[stay]


def _rows_to_keep(going_N: Tensor, puzzles: int, compiled: bool) -> Tensor:
    """Returns the rows that stay in the batch: those that go on, and for a compiled net others, up
    to a size that it was compiled for.
    """
    kept = going = int(going_N.sum())
    if compiled and going:
        sizes = {-(-puzzles // 2**halving) for halving in range(HALVINGS + 1)}
        kept = min(size for size in sizes if size >= going)
    return (~going_N).to(torch.uint8).argsort(stable=True)[:kept]
