"""Answers puzzles with a recursive net: for how many steps, along how many chains of thought."""

# P puzzles of a batch, N of them still in the batch, C chains of each, T tokens, V vocabulary,
# L positions, D width

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from models.objective import Batch
from models.recursive.recursion import RecursiveNet, State
from utils.noise import Noise

# each batch size is compiled separately, so there are few sizes, each half of the one before
HALVINGS = 3


def answers_by_step(model: RecursiveNet, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, after each thinking step, the token logits and halting logits of every puzzle, and
    the number of steps that it has taken.

    With several chains, the one with the highest halting logit answers for its puzzle. With
    `eval_halt`, a puzzle leaves the batch with its answer when the net wants to halt and has given
    the same answer one step before; the net alone often wants to halt a step too early. There are
    no more steps once all puzzles have left.
    """
    sizes, inputs = model.sizes, batch["inputs"]
    rows = model.puzzle_rows(batch["puzzle_identifiers"])
    each = partial(torch.repeat_interleave, repeats=sizes.chains, dim=0)
    state, weights = _initial_states(model, inputs), model.weights_in_dtype()
    if sizes.chains > 1:
        inputs, rows = each(inputs), None if rows is None else each(rows)
    steps_P = torch.zeros_like(batch["puzzle_identifiers"])
    puzzle_N = torch.arange(len(steps_P), device=steps_P.device)
    going_N = torch.ones_like(steps_P, dtype=torch.bool)
    answer_NT = torch.full_like(batch["inputs"], -1)
    logits_PTV = q_P2 = None
    for _ in range(sizes.halt_max_steps):
        state, logits_NTV, q_N2 = model(state, inputs, rows, weights)
        if sizes.chains > 1:
            logits_NTV, q_N2 = _best_chain(logits_NTV, q_N2, sizes.chains)
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
                number_C = torch.arange(sizes.chains, device=stay.device)
                chain = (stay[:, None] * sizes.chains + number_C).flatten()
                state, inputs = (state[0][chain], state[1][chain]), inputs[chain]
                rows = None if rows is None else rows[chain]


def _rows_to_keep(going_N: Tensor, puzzles: int, compiled: bool) -> Tensor:
    """Returns the rows that stay in the batch: those that go on, and for a compiled net others, up
    to a size that it was compiled for.
    """
    kept = going = int(going_N.sum())
    if compiled and going:
        sizes = {-(-puzzles // 2**halving) for halving in range(HALVINGS + 1)}
        kept = min(size for size in sizes if size >= going)
    return (~going_N).to(torch.uint8).argsort(stable=True)[:kept]


def _best_chain(logits_NTV: Tensor, q_N2: Tensor, chains: int) -> tuple[Tensor, Tensor]:
    """Chooses the chain with the highest halting logit for each puzzle."""
    best = q_N2[:, 0].view(-1, chains).argmax(1)
    chosen = best + torch.arange(0, len(q_N2), chains, device=best.device)
    return logits_NTV[chosen], q_N2[chosen]


def _initial_states(model: RecursiveNet, inputs_PT: Tensor) -> State:
    """Returns the initial states of each puzzle's chains: the net's own, and noisy copies of it.

    The noise depends on the seed and the puzzle alone, not on batches or ranks.
    """
    state, sizes = model.fresh_state(*inputs_PT.shape), model.sizes
    if sizes.chains == 1:
        return state
    puzzles = [zlib.crc32(puzzle.tobytes()) for puzzle in inputs_PT.cpu().numpy()]
    noise = Noise(sizes.chain_seed, 0, puzzles, inputs_PT.device)

    def around(name: str, start_PLD: Tensor) -> Tensor:
        count, *shape = start_PLD.shape
        drawn = noise.normal(f"chains of {name}", (count * (sizes.chains - 1), *shape))
        away = drawn.view(count, -1, *shape)
        start_PCLD = start_PLD[:, None].expand(-1, sizes.chains, -1, -1).clone()
        start_PCLD[:, 1:] += (sizes.chain_noise * away).to(start_PLD.dtype)
        return start_PCLD.flatten(0, 1)

    return around("z_H", state[0]), around("z_L", state[1])
