"""Answers puzzles with a recursive net: for how many steps it thinks about each, in how many
chains.
"""

# P puzzles of a batch, N of them still in the batch, C chains of those, T tokens, V vocabulary

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from contract import Batch, Noise
from models.recursive.recursion import RecursiveNet, State

# each batch size is compiled separately, so there are few sizes, each half of the one before
HALVINGS = 3


def answers_by_step(model: RecursiveNet, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, after each thinking step, the token logits and halting logits of every puzzle, and
    the number of steps that it has taken.

    With `eval_halt`, a puzzle leaves the batch with its answer when the net wants to halt and has
    given the same answer one step before; the net alone often wants to halt a step too early. There
    are no more steps once all puzzles have left.
    """
    # `puzzle_N` holds the puzzle of each row that is still in the batch, at first all
    sizes, chains = model.sizes, Chains(model, batch)
    steps_P = torch.zeros_like(batch["puzzle_identifiers"])
    puzzle_N = torch.arange(len(steps_P), device=steps_P.device)
    going_N = torch.ones_like(steps_P, dtype=torch.bool)
    answer_NT = torch.full_like(batch["inputs"], -1)
    logits_PTV = q_P2 = None
    for step in range(sizes.halt_max_steps):
        logits_NTV, q_N2 = chains.think(step)
        # rows of puzzles that have left keep the answer they left with
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
            # smaller batches, and with them less work, as puzzles leave
            stay = _rows_to_keep(going_N, len(steps_P), model.compiled)
            if not len(stay):
                return
            if len(stay) < len(going_N):
                puzzle_N, going_N, answer_NT = puzzle_N[stay], going_N[stay], answer_NT[stay]
                chains.keep(stay)


class Chains:
    """The chains of thought about the puzzles of a batch, those of each puzzle side by side.

    They differ by noise, which depends on the puzzle, the chain and the step alone.
    """

    def __init__(self, model: RecursiveNet, batch: Batch) -> None:
        self._model = model
        self._each = partial(torch.repeat_interleave, repeats=model.sizes.chains, dim=0)
        # noise is keyed by the puzzle's own tokens, so an answer does not depend on its batch
        inputs_NT, rows_NP = batch["inputs"], model.puzzle_rows(batch["puzzle_identifiers"])
        self._keys_N = [zlib.crc32(puzzle.tobytes()) for puzzle in inputs_NT.cpu().numpy()]
        self._inputs_CT = self._each(inputs_NT)
        self._rows_CP = None if rows_NP is None else self._each(rows_NP)
        self._state = model.fresh_state(self._noise(0), *self._inputs_CT.shape)

    def think(self, step: int) -> tuple[Tensor, Tensor]:
        """Takes a thinking step in each chain. Returns the token logits and halting logits of the
        chain that answers for each puzzle.
        """
        sizes, before = self._model.sizes, self._state
        noise = self._model.path_noise(self._noise(step), before, sizes.eval_noise)
        self._state, logits_CTV, q_C2 = self._model(before, self._inputs_CT, self._rows_CP, noise)
        if sizes.chains == 1:
            return logits_CTV, q_C2
        # the chain that answers: the one most ready to halt, or the one that has settled
        score_C = q_C2[:, 0] if sizes.judge == "halting" else -_change(before, self._state)
        best_N = score_C.view(-1, sizes.chains).argmax(1)
        # from the number of a chain within its puzzle to that among all chains
        best_N += torch.arange(0, len(score_C), sizes.chains, device=best_N.device)
        return logits_CTV[best_N], q_C2[best_N]

    def keep(self, stay_N: Tensor) -> None:
        """Drops all puzzles but these."""
        chains = self._model.sizes.chains
        # the rows of a puzzle's chains follow from its row, as they lie side by side
        stay_C = self._each(stay_N * chains)
        stay_C += torch.arange(chains, device=stay_C.device).repeat(len(stay_N))
        self._keys_N = [self._keys_N[row] for row in stay_N.tolist()]
        self._inputs_CT = self._inputs_CT[stay_C]
        self._rows_CP = None if self._rows_CP is None else self._rows_CP[stay_C]
        self._state = tuple(z[stay_C] for z in self._state)

    def _noise(self, step: int) -> Noise:
        return Noise(0, step, self._keys_N, self._inputs_CT.device)


def _change(before: State, after: State) -> Tensor:
    """Returns the square of the distance between the states of each chain."""
    changes = (
        (new - old).float().square().flatten(1).sum(1)
        for new, old in zip(before, after, strict=True)
    )
    return torch.stack(tuple(changes)).sum(0)


def _rows_to_keep(going_N: Tensor, puzzles: int, compiled: bool) -> Tensor:
    """Returns the rows that stay in the batch: those that go on, and for a compiled net others, up
    to a size that it was compiled for.
    """
    kept = going = int(going_N.sum())
    # a new size would be compiled anew; padding with finished puzzles costs less
    if compiled and going:
        sizes = {-(-puzzles // 2**halving) for halving in range(HALVINGS + 1)}
        kept = min(size for size in sizes if size >= going)
    return (~going_N).to(torch.uint8).argsort(stable=True)[:kept]
