"""Sudoku by guessing: the net fills in what it is sure of, guesses one cell, and thinks again.

In training, each slot plays its board to the end. A guess is drawn from the net's own
probabilities; some wrong ones are corrected, and the others stay for a while, so that the net
learns to tell boards with a wrong guess from others. In an evaluation, a search over guesses
relies on that.
"""

# B slots, T cells, N digits, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from contract import (
    IGNORE,
    Batch,
    Context,
    Evaluator,
    Noise,
    Objective,
    Prediction,
    StepOut,
)
from models.interval import Interval
from models.recursive.candidates import BLANK, CandidateNet, what_is_known
from models.recursive.recursion import where_slots
from models.recursive.search import Rules, answers_by_search, fill_in
from models.recursive.thinking import ByStep, ThinkingSteps
from utils.command.marks import Fraction
from utils.ranks import signals


@dataclass(frozen=True)
class GuessCarry:
    """The state that each slot keeps from one step to the next."""

    state: Tensor
    board: Tensor  # the puzzle with what has been filled in
    steps: Tensor  # taken on this puzzle
    lost: Tensor  # steps since the first wrong guess, 0 before it
    done: Tensor  # whether the slot takes a new puzzle in the next step
    batch: Batch  # its puzzle


class GuessKeys(Rules):
    """The keys under `arch.loss`: those of an evaluation's search, and those of training."""

    sure: Annotated[float, Field(ge=0.5, le=1)]
    """In training, digits of a higher probability are filled in at once"""
    board_steps: Annotated[int, Field(ge=1, le=1000)]
    """Most steps on a board in training"""
    revealed: Fraction
    """In half of the boards, up to this share of the blanks is given"""
    corrected: Fraction
    """Fraction of the guesses in training that are corrected"""
    wrong_steps: Annotated[int, Field(ge=0, le=1000)]
    """Steps in training after a wrong guess"""
    value_weight: NonNegativeFloat
    """Weight of the loss by which a net learns to recognise wrong guesses"""


class GuessObjective(Objective):
    """Sums two losses over slots: the cross entropy of the cells that are still open, where no
    guess was wrong, and that of the value. Padding rows do not count.
    """

    headline = "exact_accuracy"
    costs = frozenset({"cell_loss", "value_loss", "accepted_wrongly"})
    model: CandidateNet

    def __init__(self, model: CandidateNet, keys: GuessKeys) -> None:
        super().__init__(model)
        self.keys = keys

    def initial_carry(self, batch: Batch) -> GuessCarry:
        """Returns slots that are all done, so that the first step fills them."""
        nothing = torch.zeros_like(batch["puzzle_identifiers"])
        state = self.model.fresh_state(len(nothing))
        return GuessCarry(state, batch["inputs"], nothing, nothing, nothing == 0, batch)

    def forward(self, batch: Batch, carry: GuessCarry, ctx: Context) -> StepOut:
        carry = self._refill(carry, batch, ctx.noise)
        inputs_BT, labels_BT = carry.batch["inputs"], carry.batch["labels"]
        known_BTN = what_is_known(inputs_BT, carry.board, self.model.side)
        state, logits_BTN, value_B = self.model(carry.state, known_BTN)

        # the loss of the cells: only open ones are asked, each board counts the same
        counted_BT, valid_B = labels_BT != IGNORE, (labels_BT != IGNORE).any(-1)
        right_B, open_BT = carry.lost == 0, carry.board == BLANK
        digits_BT = (labels_BT - BLANK - 1).clamp_min(0).long()
        nats_BT = F.cross_entropy(logits_BTN.mT, digits_BT, reduction="none")
        # after a wrong guess, the right digits of the other cells no longer follow from the board
        learnt_BT = open_BT & counted_BT & right_B[:, None]
        cell_loss = ((nats_BT * learnt_BT).sum(-1) / learnt_BT.sum(-1).clamp_min(1)).sum()
        # the loss of the value: has every guess so far been right?
        value_nats_B = F.binary_cross_entropy_with_logits(
            value_B, right_B.to(value_B.dtype), reduction="none"
        )
        value_loss = (value_nats_B * valid_B).sum()

        # the board moves on by what this pass says, not by its gradients
        with torch.no_grad():
            played = self._play(carry, state, logits_BTN, ctx.noise)
        metrics = {
            **self._metrics(carry, played, value_B, valid_B),
            "cell_loss": (cell_loss.detach(), learnt_BT.any(-1).sum()),
            "value_loss": (value_loss.detach(), valid_B.sum()),
        }
        loss = cell_loss + self.keys.value_weight * value_loss
        return StepOut(loss, valid_B.sum(), metrics, played)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Prediction:
        """Searches for the answers, and records the best ones after each step."""
        labels_BT, steps = batch["labels"], self.keys.search_steps
        seen = ByStep(labels_BT, steps)
        # the same record by step as for nets without a search
        what = f"searching a batch of {len(labels_BT)}: step"
        searched = answers_by_search(self.model, batch, self.keys)
        for step, (logits_BTV, margin_B) in enumerate(searched):
            self.progress(what, step, steps)
            value_B = margin_B + self.keys.threshold
            seen.add(logits_BTV, value_B, margin_B)
            if signals.stop_signal():  # the evaluation is cut short, and repeated after a resume
                break
        counted_BT = labels_BT != IGNORE
        cells_B, answer_BT = counted_BT.sum(-1), logits_BTV.argmax(-1)
        right_B = (counted_BT & (answer_BT == labels_BT)).sum(-1)
        valid_B, solved_B = cells_B > 0, right_B == cells_B
        count = valid_B.sum()
        # boards accepted by the net's own value; those that are wrong show how far to trust it
        found_B = margin_B > 0
        metrics = {
            "exact_accuracy": ((valid_B & solved_B).sum(), count),
            "accuracy": ((right_B / cells_B.clamp_min(1)).sum(), count),
            "accepted": ((valid_B & found_B).sum(), count),
            "accepted_wrongly": ((valid_B & found_B & ~solved_B).sum(), count),
        }
        outputs = {"logits": logits_BTV, "answer": answer_BT, "q_halt_logits": value_B}
        return Prediction(metrics, outputs | seen.outputs())

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        return [Interval(self.headline), ThinkingSteps()]

    def _refill(self, carry: GuessCarry, batch: Batch, noise: Noise) -> GuessCarry:
        """Gives slots that are done a puzzle of the new batch, some of whose blanks are revealed in
        half of them: an easier board to learn from.
        """
        # draw for every slot, so that the numbers do not depend on which ones are done
        shape, done_B = batch["inputs"].shape, carry.done
        share_B = self.keys.revealed * noise.uniform("share", shape[:1])
        share_B = share_B * (noise.uniform("easier", shape[:1]) < 0.5)
        inputs_BT, labels_BT = batch["inputs"], batch["labels"]
        # blanks whose digit is given away
        reveal_BT = noise.uniform("reveal", shape) < share_B[:, None]
        reveal_BT = reveal_BT & (inputs_BT == BLANK) & (labels_BT != IGNORE)
        new = batch | {"inputs": torch.where(reveal_BT, labels_BT, inputs_BT)}
        puzzle = {name: where_slots(done_B, new[name], carry.batch[name]) for name in new}
        # slots that are done begin anew; the others go on with what they have
        return GuessCarry(
            where_slots(done_B, self.model.fresh_state(len(done_B)), carry.state),
            where_slots(done_B, puzzle["inputs"], carry.board),
            torch.where(done_B, 0, carry.steps),
            torch.where(done_B, 0, carry.lost),
            torch.zeros_like(done_B),
            puzzle,
        )

    def _play(
        self, carry: GuessCarry, state: Tensor, logits_BTN: Tensor, noise: Noise
    ) -> GuessCarry:
        """Fills in what the net is sure of and, if it has thought for long enough, one guess."""
        # what is sure is filled in at once; a guess waits until the net has thought for a while
        labels_BT, slots_B = carry.batch["labels"], torch.arange(len(logits_BTN))
        slots_B = slots_B.to(logits_BTN.device)
        p_BTN = logits_BTN.softmax(-1)
        board_BT, cell_B, open_B = fill_in(carry.board, p_BTN, self.keys.sure, noise)
        guesses_B = open_B & (carry.steps >= self.keys.think_steps)

        # the guess: drawn from the net's own probabilities, or corrected
        below_BN = p_BTN[slots_B, cell_B].cumsum(-1)
        drawn_B1 = noise.uniform("digit", cell_B.shape)[:, None] * below_BN[:, -1:]
        digit_B = (below_BN <= drawn_B1).sum(-1).clamp_max(self.model.side - 1) + BLANK + 1
        truth_B = labels_BT[slots_B, cell_B]
        corrects_B = noise.uniform("correct", cell_B.shape) < self.keys.corrected
        corrects_B = corrects_B & (truth_B != IGNORE)
        digit_B = torch.where(corrects_B, truth_B.long(), digit_B).to(board_BT.dtype)
        board_BT[slots_B, cell_B] = torch.where(guesses_B, digit_B, board_BT[slots_B, cell_B])

        # a board with a wrong guess goes on for a while: the value learns from it
        wrong_B = ((board_BT != BLANK) & (labels_BT != IGNORE) & (board_BT != labels_BT)).any(-1)
        lost_B, steps_B = torch.where(wrong_B, carry.lost + 1, carry.lost), carry.steps + 1
        full_B = (carry.board != BLANK).all(-1)  # the board that the net has just seen
        done_B = full_B | (steps_B >= self.keys.board_steps) | (lost_B > self.keys.wrong_steps)
        return GuessCarry(state, board_BT, steps_B, lost_B, done_B, carry.batch)

    def _metrics(
        self, carry: GuessCarry, played: GuessCarry, value_B: Tensor, valid_B: Tensor
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        done_B = played.done & valid_B
        solved_B = (played.board == carry.batch["labels"]).all(-1)
        right_B, count = carry.lost == 0, valid_B.sum()
        return {
            "exact_accuracy": ((solved_B & done_B).sum(), done_B.sum()),
            "value_accuracy": ((((value_B >= 0) == right_B) & valid_B).sum(), count),
            "steps": ((played.steps * done_B).sum(), done_B.sum()),
        }
