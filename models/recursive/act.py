"""Adaptive computation time: each slot of the batch thinks about its puzzle until it halts."""

# B slots, T tokens, L positions (puzzle prefix + tokens), D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import Doc

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
from models.layers import widen
from models.recursive.answering import answers_by_step
from models.recursive.recursion import RecursiveNet, State, where_slots
from models.recursive.thinking import ByStep, ThinkingSteps
from utils.transfer import to_device, wide


@dataclass(frozen=True)
class ActCarry:
    """The state that each slot keeps from one step to the next."""

    state: State
    steps: Tensor  # how many thinking steps it has spent on its puzzle
    halted: Tensor  # whether the slot takes a new puzzle in the next step
    batch: Batch  # its puzzle


class ActObjective(Objective):
    """Sums the token loss and the halting Q losses over slots. Padding rows do not count."""

    headline = "exact_accuracy"
    costs = frozenset({"lm_loss", "q_halt_loss", "q_continue_loss"})
    model: RecursiveNet

    def __init__(
        self,
        model: RecursiveNet,
        loss_type: Literal["stablemax_cross_entropy", "softmax_cross_entropy"],
        label_smoothing: Annotated[
            float, Field(ge=0, lt=1), Doc("share of the target that is spread over all tokens")
        ],
    ) -> None:
        super().__init__(model)
        self.token_loss = partial(LOSSES[loss_type], smoothing=label_smoothing)
        self._losses: Callable[..., Any] = self._sum_losses

    def compile_net(self) -> None:
        super().compile_net()
        self._losses = torch.compile(self._sum_losses, dynamic=False)

    def initial_carry(self, batch: Batch) -> ActCarry:
        """Returns slots that have all halted, so that the first step fills them."""
        slots, tokens = batch["inputs"].shape
        steps = torch.zeros_like(batch["puzzle_identifiers"])
        halted = torch.ones_like(steps, dtype=torch.bool)
        any_noise = Noise(0, 0, range(1), steps.device)  # the first step draws its own
        return ActCarry(self.model.fresh_state(any_noise, slots, tokens), steps, halted, batch)

    def forward(self, batch: Batch, carry: ActCarry, ctx: Context) -> StepOut:
        # a slot that has halted takes the next puzzle, so the batch never waits for its slowest
        # puzzle
        carry = self._refill(carry, batch, ctx.noise)
        rows = self.model.puzzle_rows(self._trainable_ids(carry.batch))
        inputs = carry.batch["inputs"]
        noise = self.model.path_noise(ctx.noise, carry.state, self.model.sizes.path_noise)
        state, logits_BTV, q_B2 = self.model(carry.state, inputs, rows, noise)

        # the slots that halt now begin the next step with other puzzles
        target = None
        with torch.no_grad():
            steps, last = carry.steps + 1, carry.steps + 1 >= self.model.sizes.halt_max_steps
            halted = self._choose_to_halt(q_B2, steps, last, ctx)
            if not self.model.sizes.no_ACT_continue and self.model.sizes.halt_max_steps > 1:
                # the value of continuing is that of the better choice one step later; the batch is
                # large, so no target net is needed
                _, _, next_B2 = self.model(state, inputs, rows)
                target = torch.sigmoid(torch.where(last, next_B2[:, 0], next_B2.amax(-1)))

        labels_BT = carry.batch["labels"]
        loss, weight, metrics = self._losses(logits_BTV, q_B2, target, steps, halted, labels_BT)
        return StepOut(loss, weight, metrics, ActCarry(state, steps, halted, carry.batch))

    def predict(self, batch: Batch) -> Prediction:
        """Answers puzzles, and records the answers after each thinking step."""
        sizes, seen = self.model.sizes, ByStep(batch["labels"], self.model.sizes.halt_max_steps)
        # the last step's answer is scored; those before it show how thinking helps
        for step, out in enumerate(answers_by_step(self.model, batch)):
            self.progress("thinking about a batch: step", step, sizes.halt_max_steps)
            logits_BTV, q_B2, steps = out
            seen.add(logits_BTV, q_B2[:, 0], self.model.halting_margin(q_B2))
        # every answer is final now, so metrics count all puzzles
        halted = torch.ones_like(steps, dtype=torch.bool)
        _, _, metrics = self._losses(logits_BTV, q_B2, None, steps, halted, batch["labels"])
        outputs = {
            "logits": logits_BTV,
            "answer": logits_BTV.argmax(-1),
            "q_halt_logits": q_B2[:, 0],
            "q_continue_logits": q_B2[:, 1],
        }
        outputs |= seen.outputs(steps if sizes.eval_halt else None)
        return Prediction(metrics, outputs)

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        steps = [ThinkingSteps()] if self.model.sizes.halt_max_steps > 1 else []
        return [Interval(self.headline), *steps]

    def _refill(self, carry: ActCarry, batch: Batch, noise: Noise) -> ActCarry:
        """Gives slots that halted a puzzle of the new batch and a fresh state."""
        # `where`, not indexing: shapes stay the same and the host need not know how many slots
        # halted
        halted = carry.halted
        fresh = self.model.fresh_state(noise, *batch["inputs"].shape)
        state = tuple(where_slots(halted, *pair) for pair in zip(fresh, carry.state, strict=True))
        steps = torch.where(halted, 0, carry.steps)
        puzzles = {name: where_slots(halted, batch[name], carry.batch[name]) for name in batch}
        return ActCarry(state, steps, halted, puzzles)

    @staticmethod
    def _trainable_ids(batch: Batch) -> Tensor:
        # padding trains no row of the table: a row that is looked up decays
        return torch.where((batch["labels"] != IGNORE).any(-1), batch["puzzle_identifiers"], -1)

    def _choose_to_halt(self, q_B2: Tensor, steps: Tensor, last: Tensor, ctx: Context) -> Tensor:
        sizes = self.model.sizes
        if sizes.halt_max_steps == 1:
            return last
        wants = self.model.wants_to_halt(q_B2)
        # without exploring, a net that halts early would never learn the value of more steps; the
        # host draws so few numbers faster than a GPU, and the same ones
        noise = replace(ctx.noise, device=torch.device("cpu"))
        explores = noise.uniform("explore", steps.shape) < sizes.halt_exploration_prob
        at_least = explores * noise.integers(
            "explore_steps", steps.shape, 2, sizes.halt_max_steps + 1
        )
        return (last | wants) & (steps >= to_device(at_least, steps.device))

    def _sum_losses(
        self,
        logits_BTV: Tensor,
        q_B2: Tensor,
        target: Tensor | None,
        steps: Tensor,
        halted: Tensor,
        labels_BT: Tensor,
    ) -> tuple[Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]:
        counted_BT = labels_BT != IGNORE
        cells_B = counted_BT.sum(-1)
        valid_B = cells_B > 0
        with torch.no_grad():
            # without gradients, as these are also the target of the halting logit
            right_B = _right_cells(logits_BTV, labels_BT)
            solved_B = right_B == cells_B
        divisor_B = cells_B.clamp_min(1)  # puzzles count alike, however many cells they have
        token_loss_B = self.token_loss(logits_BTV, labels_BT).sum(-1) / divisor_B
        token_loss = (token_loss_B * valid_B).sum()
        # the halting logit learns whether the answer is right as it stands
        halt_loss = _q_loss(q_B2[:, 0], solved_B.to(q_B2.dtype), valid_B)
        loss, weight = token_loss + 0.5 * halt_loss, valid_B.sum()

        # as published, metrics count a puzzle once, when its slot halts
        done_B = halted & valid_B
        done = done_B.sum()
        metrics = {
            "accuracy": ((right_B / divisor_B * done_B).sum(), done),
            "exact_accuracy": ((solved_B & done_B).sum(), done),
            "q_halt_accuracy": ((done_B & ((q_B2[:, 0] >= 0) == solved_B)).sum(), done),
            "steps": ((steps * done_B).sum(), done),
            "lm_loss": (token_loss.detach(), weight),
            "q_halt_loss": (halt_loss.detach(), weight),
        }
        # HRM's second Q value: that of another step of thinking
        if target is not None:
            continue_loss = _q_loss(q_B2[:, 1], target, valid_B)
            loss = loss + 0.5 * continue_loss
            metrics["q_continue_loss"] = (continue_loss.detach(), weight)
        return loss, weight, metrics


def _right_cells(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return ((labels_BT != IGNORE) & (logits_BTV.argmax(-1) == labels_BT)).sum(-1)


def _q_loss(logits_B: Tensor, target_B: Tensor, valid_B: Tensor) -> Tensor:
    loss_B = F.binary_cross_entropy_with_logits(logits_B, target_B, reduction="none")
    return (loss_B * valid_B).sum()


def stablemax_cross_entropy(
    logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Returns the cross entropy of each cell under stablemax (Prieto et al. 2025), in float64
    where the device has it; zero where the label is to be ignored.

    Scores are linear above zero and reciprocal below.
    """
    # exponentials of large logits swallow the others in a sum of floats, and gradients vanish;
    # linear scores do not
    x = wide(logits_BTV)
    scores = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    counted = labels_BT != IGNORE
    index = torch.where(counted, labels_BT, 0).long().unsqueeze(-1)
    target = scores.gather(-1, index).squeeze(-1).log()
    # as in label smoothing of a softmax: part of the target is spread evenly
    if smoothing:
        target = torch.lerp(target, scores.log().mean(-1), smoothing)
    return torch.where(counted, scores.sum(-1).log() - target, 0.0)


def softmax_cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the usual cross entropy of each cell."""
    logits, labels = widen(logits_BTV).flatten(0, -2), labels_BT.long().flatten()
    return F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    ).view(labels_BT.shape)


LOSSES = {loss.__name__: loss for loss in (stablemax_cross_entropy, softmax_cross_entropy)}
