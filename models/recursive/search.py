"""Searches for the answers of Sudoku boards by guessing, along the lines that a net rates best."""

# P puzzles of a batch, N nodes of all puzzles, C children, T cells, D digits, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from contract import Batch, Noise
from models.recursive.candidates import BLANK, CandidateNet, what_is_known
from utils.command.marks import SAME_RUN, Keys

# Nodes that go through the net at once, the shape that it is compiled for: fewer are padded. On a
# CPU, each of 8 costs no more than each of 64.
AT_ONCE_ON_CPU, AT_ONCE = 8, 64
# For each puzzle, so many of the waiting boards keep their states; the others begin anew. A search
# that ends within so many boards does not change.
WITH_STATE = 64
NEVER = -1e4  # as a logit
JITTER = 0.2  # in training, cells are guessed whose entropy is at most so many nats above the least


class Rules(Keys):
    """How an evaluation searches."""

    think_steps: Annotated[int, Field(ge=0, le=1000)]
    """Steps on a board before the first guess, also in training"""
    fill_above: Annotated[float, Field(ge=0.5, le=1), SAME_RUN]
    """In an evaluation, digits of a higher probability are filled in at once"""
    try_above: Annotated[float, Field(gt=0, le=0.03), SAME_RUN]
    """Digits of a higher probability are tried in an evaluation's search"""
    beam: Annotated[PositiveInt, SAME_RUN]
    """Boards with guesses that each step of an evaluation looks at for each puzzle"""
    waiting: Annotated[NonNegativeInt, SAME_RUN]
    """More boards with guesses that an evaluation keeps for each puzzle"""
    search_steps: Annotated[int, Field(ge=1, le=1000), SAME_RUN]
    """Most steps of an evaluation"""
    accept: Annotated[float, Field(gt=0, lt=1), SAME_RUN]
    """A full board ends an evaluation's search if the net judges it right, and finds each of its
    digits again, with a higher probability
    """

    @property
    def threshold(self) -> float:
        """Returns `accept` as a logit."""
        return math.log(self.accept / (1 - self.accept))


def fill_in(
    board_NT: Tensor, p_NTD: Tensor, sure: float, noise: Noise | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills in digits that the net is sure of. Returns the new boards, and for each the cell to
    guess next and whether any is left.

    It is the cell whose digits have the least entropy, or with `noise` one that comes close.
    """
    best_NT, digit_NT = p_NTD.max(-1)
    open_NT = board_NT == BLANK
    sure_NT = open_NT & (best_NT > sure)
    board_NT = torch.where(sure_NT, (digit_NT + BLANK + 1).to(board_NT.dtype), board_NT)
    # a guess is most often right in the cell with the least entropy
    open_NT, doubt_NT = open_NT & ~sure_NT, torch.special.entr(p_NTD).sum(-1)
    if noise is not None:
        doubt_NT = doubt_NT + JITTER * noise.uniform("cell", doubt_NT.shape)
    return board_NT, torch.where(open_NT, doubt_NT, math.inf).argmin(-1), open_NT.any(-1)


@dataclass(frozen=True)
class Nodes:
    """Boards with guesses, which the net has not seen yet; several for each puzzle."""

    puzzle: Tensor
    board: Tensor
    state: Tensor  # the row that each goes on from; row 0 is the state that every board begins with
    guesses: Tensor  # the log of the probabilities of all its guesses, multiplied
    rank: Tensor  # the highest are seen next

    def take(self, rows: Tensor) -> Nodes:
        return Nodes(*(of[rows] for of in vars(self).values()))

    def plus(self, more: Nodes) -> Nodes:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Nodes(*(torch.cat(pair) for pair in pairs))


class Answers:
    """The best answer of each puzzle so far: its full board of the highest value, and before there
    is one, the board of its best node with the likeliest digits in the blanks.
    """

    def __init__(self, inputs_PT: Tensor, vocabulary: int, dtype: torch.dtype) -> None:
        new = partial(torch.full, dtype=dtype, device=inputs_PT.device)
        self.logits_PTV = new((*inputs_PT.shape, vocabulary), 0.0)
        self.value_P = new((len(inputs_PT),), NEVER)  # a logit, for full boards alone

    def take_in(self, nodes: Nodes, logits_NTD: Tensor, value_N: Tensor) -> None:
        """Takes over the best of some nodes where it is better, or where no board is full yet."""
        # full boards come before others, and among each kind the highest value decides
        full_N = (nodes.board != BLANK).all(-1)
        place_N = places(nodes.puzzle, value_N + torch.where(full_N, -NEVER, 0.0))
        best = (place_N == 0).nonzero()[:, 0]
        value_N = torch.where(full_N, value_N, NEVER)
        # of equal values take the newer: a board that is not full yet has more cells by now
        best = best[value_N[best] >= self.value_P[nodes.puzzle[best]]]
        puzzle = nodes.puzzle[best]
        self.logits_PTV[puzzle] = as_logits(nodes.board[best], logits_NTD[best])
        self.value_P[puzzle] = value_N[best]


def answers_by_search(
    model: CandidateNet, batch: Batch, rules: Rules
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, after each step, the logits of each puzzle's best answer so far, and by how much its
    value exceeds what is accepted. Ends when no puzzle has nodes left.
    """
    # every puzzle begins with one node: its own board, without guesses
    inputs_PT, device = batch["inputs"], batch["inputs"].device
    wide = torch.promote_types(model.dtype, torch.float32)
    answers = Answers(inputs_PT, model.side + BLANK + 1, wide)
    first_P = torch.arange(len(inputs_PT), device=device)
    states = model.fresh_state(1)
    certain_P = torch.zeros(len(first_P), device=device)
    nodes = Nodes(first_P, inputs_PT, torch.zeros_like(first_P), certain_P, certain_P)
    waiting = nodes.take(first_P[:0])
    weights, threshold = model.weights_in_dtype(), rules.threshold
    for step in range(rules.search_steps):
        # look at the boards of this step, and keep the best answers
        state, logits_NTD, value_N = think(model, weights, inputs_PT, nodes, states)
        value_N = second_look(model, weights, inputs_PT, nodes, value_N, threshold)
        answers.take_in(nodes, logits_NTD, value_N)
        yield answers.logits_PTV.clone(), answers.value_P - threshold

        # boards that the net has seen now: puzzles without an accepted answer go on
        searched_P = answers.value_P <= threshold
        going = (searched_P[nodes.puzzle] & (nodes.board == BLANK).any(-1)).nonzero()[:, 0]
        place = len(states) + torch.arange(len(going), device=device)
        states = torch.cat((states, state[going]))
        nodes, p_NTD = nodes.take(going), logits_NTD[going].softmax(-1)
        seen = replace(nodes, state=place, rank=F.logsigmoid(value_N[going]))
        found = next_nodes(seen, p_NTD, rules, guess=step >= rules.think_steps)
        # of equal ranks, the newest is seen first
        waiting = found.plus(waiting.take(searched_P[waiting.puzzle].nonzero()[:, 0]))
        if not len(waiting.puzzle):
            return
        # the best of each puzzle are seen next, some more wait, and the rest is given up
        place_N = places(waiting.puzzle, waiting.rank)
        state_N = torch.where(place_N < rules.beam + WITH_STATE, waiting.state, 0)
        needed, row_N = F.pad(state_N, (1, 0)).unique(return_inverse=True)
        states, waiting = states[needed], replace(waiting, state=row_N[1:])
        nodes = waiting.take((place_N < rules.beam).nonzero()[:, 0])
        later_N = (place_N >= rules.beam) & (place_N < rules.beam + rules.waiting)
        waiting = waiting.take(later_N.nonzero()[:, 0])


def think(
    model: CandidateNet, weights: dict[str, Tensor], inputs_PT: Tensor, nodes: Nodes, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one step of the net on all nodes, some at a time."""
    known_NTD = what_is_known(inputs_PT[nodes.puzzle], nodes.board, model.side)
    # all calls have the same shape, so a compiled net is compiled once
    size = AT_ONCE_ON_CPU if known_NTD.device.type == "cpu" else AT_ONCE
    outs = []
    for place, known in zip(nodes.state.split(size), known_NTD.split(size), strict=True):
        state, count = states[place], len(place)
        if model.compiled and count < size:
            more = torch.arange(size, device=state.device).clamp_max(count - 1)
            state, known = state[more], known[more]
        outs.append([out[:count] for out in model(state, known, weights)])
    state, logits, value = (torch.cat(parts) for parts in zip(*outs, strict=True))
    return state, logits, value


def second_look(
    model: CandidateNet,
    weights: dict[str, Tensor],
    inputs_PT: Tensor,
    nodes: Nodes,
    value_N: Tensor,
    threshold: float,
) -> Tensor:
    """Lowers the value of full boards that would be accepted to that of their most doubtful digit:
    a row or a column at a time is blank, given or not, and the net begins from a fresh state. In a
    wrong board, some digit does not follow from the other rows or columns, which a net can tell
    before it can judge a board as a whole.
    """
    full_N = (nodes.board > BLANK).all(-1)  # a padding row has tokens below the blank
    asked = (full_N & (value_N > threshold)).nonzero()[:, 0]
    if not len(asked):
        return value_N
    # with only some cells of a line blank, a net trusts the others more than it should
    cell_T, line_L1 = torch.arange(model.side**2), torch.arange(model.side)[:, None]
    blank_ST = torch.cat((cell_T // model.side == line_L1, cell_T % model.side == line_L1))
    blank_MT = blank_ST.to(value_N.device).repeat(len(asked), 1)
    full = nodes.take(asked.repeat_interleave(len(blank_ST)))
    board_MT = torch.where(blank_MT, BLANK, full.board)
    afresh = replace(full, board=board_MT, state=torch.zeros_like(full.state))
    _, logits_MTD, _ = think(model, weights, inputs_PT, afresh, model.fresh_state(1))
    digit_MT1 = (full.board - BLANK - 1).long()[..., None]
    p_MT = logits_MTD.softmax(-1).gather(-1, digit_MT1)[..., 0]
    least_A = torch.where(blank_MT, p_MT, 1.0).view(len(asked), -1).amin(-1).to(value_N.dtype)
    return value_N.index_put((asked,), value_N[asked].minimum(least_A.logit(eps=1e-6)))


def next_nodes(nodes: Nodes, p_NTD: Tensor, rules: Rules, guess: bool) -> Nodes:
    """Fills in what is sure and, if asked to `guess`, replaces each node by one for each digit of
    its next cell that is to be tried. A digit that is filled in may be wrong, however sure the net
    is: the boards with others in its place are nodes, too.

    A node's rank is the log probability that its guesses are right: by the probabilities of all of
    them and by the value of its parent, which alone accepts too many wrong lines.
    """
    # the main line: fill in what is sure
    board_NT, cell_N, open_N = fill_in(nodes.board, p_NTD, rules.fill_above)
    # the boards with another digit where one was filled in, in case the net is sure and wrong
    best_NTD = F.one_hot(p_NTD.argmax(-1), p_NTD.shape[-1]).bool()
    instead = children(nodes, p_NTD, (board_NT != nodes.board)[..., None] & ~best_NTD, rules)
    nodes, guesses_N = replace(nodes, board=board_NT), open_N & guess
    # the guess: one board for each digit of the chosen cell
    next_NT = F.one_hot(cell_N, p_NTD.shape[1]).bool() & guesses_N[:, None]
    guessed = children(nodes, p_NTD, next_NT[..., None], rules)
    found = guessed.plus(nodes.take((~guesses_N).nonzero()[:, 0])).plus(instead)
    # a full board is judged from a fresh state: the old one holds the net's trust in its guesses
    open_N = (found.board == BLANK).any(-1)
    state = torch.where(open_N, found.state, 0)
    return replace(found, state=state, rank=found.rank + found.guesses)


def children(nodes: Nodes, p_NTD: Tensor, where_NTD: Tensor, rules: Rules) -> Nodes:
    """Returns a node for each digit at the given places that is to be tried."""
    parent, cell, digit = (where_NTD & (p_NTD > rules.try_above)).nonzero().unbind(1)
    nodes = nodes.take(parent)
    at = torch.arange(len(parent), device=parent.device)
    nodes.board[at, cell] = (digit + BLANK + 1).to(nodes.board.dtype)
    return replace(nodes, guesses=nodes.guesses + p_NTD[parent, cell, digit].log())


def places(puzzle_N: Tensor, rank_N: Tensor) -> Tensor:
    """Returns each row's place among those of its puzzle, 0 for the highest rank."""
    # two stable sorts put the nodes of a puzzle together, highest rank first; a row's place is then
    # its distance from the first of its puzzle
    order = rank_N.argsort(descending=True, stable=True)
    order = order[puzzle_N[order].argsort(stable=True)]
    sorted_N = puzzle_N[order]
    at_N = torch.arange(len(order), device=order.device)
    return torch.empty_like(at_N).index_copy(
        0, order, at_N - torch.searchsorted(sorted_N, sorted_N)
    )


def as_logits(board_NT: Tensor, logits_NTD: Tensor) -> Tensor:
    """Returns logits over the vocabulary: those of the digits, and certainty for filled cells."""
    # tokens before the digits are never an answer
    logits_NTV = F.pad(logits_NTD, (BLANK + 1, 0), value=NEVER)
    digits_V = torch.arange(logits_NTV.shape[-1], device=board_NT.device)
    filled_NT1 = (board_NT != BLANK)[..., None]
    certain_NTV = torch.where(board_NT[..., None] == digits_V, 0.0, NEVER)
    return torch.where(filled_NT1, certain_NTV, logits_NTV)
