"""Losses of masked nets against the same numbers written down by hand: for a toy model with two
tied matrices W [5, 2] and its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from models.decomposition.decompose import Decompose
from models.decomposition.masking import Masks, errors
from models.objective import Context
from tests.models.decomposition.test_components import ADVERSARY, changed, objective_on

NOTHING = {"stochastic": 0.0, "layerwise": 0.0, "faithfulness": 0.0, "minimality": 0.0}
C = 6


@dataclass
class ByHand:
    """The toy model, its components and its gates."""

    objective: Decompose
    batch: dict[str, Tensor]
    ctx: Context

    def __post_init__(self) -> None:
        model = self.objective.model
        net: Any = model.target.net
        self.x = self.batch["inputs"].double()
        self.W, self.b = net.linear1.weight.t(), net.linear2.bias
        (self.V, self.U), _ = model.factors(0), model.factors(1)
        self.gates = model.gate_logits([self.x, self.x @ self.W]).clamp(0, 1).detach()
        self.said = torch.relu(self.x @ self.W @ self.W.t() + self.b)

    def first(self, m: Tensor, rest: Tensor) -> Tensor:
        """What the first matrix gives under masks of its components and of what they leave."""
        left = self.x @ (self.W - self.V @ self.U)
        return ((self.x @ self.V) * m) @ self.U + rest * left

    def second(self, hidden: Tensor, m: Tensor, rest: Tensor) -> Tensor:
        left = hidden @ (self.W - self.V @ self.U).t()
        return torch.relu(((hidden @ self.U.t()) * m) @ self.V.t() + rest * left + self.b)

    def error(self, out: Tensor) -> Tensor:
        """The error of each row."""
        return (out - self.said).square().mean(-1)

    def term(self, name: str, **keys: Any) -> Tensor:
        """The only loss of an objective."""
        return changed(self.objective, **NOTHING, **keys)(self.batch, None, self.ctx).metrics[name][
            0
        ]


@pytest.fixture(scope="module")
def by_hand(tms_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ByHand:
    return ByHand(*objective_on(tms_target, tmp_path_factory.mktemp("losses")))


def ascent(h: ByHand, start: Tensor, steps: int) -> Tensor:
    """The error of each row under the worst sources [rows, 12, and 2 of what components leave], by
    plain differences.
    """

    def errors(sources: Tensor) -> Tensor:
        m = h.gates + (1 - h.gates) * sources[:, : 2 * C]
        return h.error(h.second(h.first(m[:, :C], sources[:, 12:13]), m[:, C:], sources[:, 13:]))

    def slope(sources: Tensor, number: int) -> Tensor:
        up, down = sources.clone(), sources.clone()
        up[:, number] += 1e-6
        down[:, number] -= 1e-6
        return errors(up) - errors(down)

    sources = start.clone()
    for _ in range(steps):
        slopes = [slope(sources, number) for number in range(sources.shape[1])]
        signs = torch.stack([torch.where(s.abs() < 1e-13, 0, s.sign()) for s in slopes], -1)
        sources = (sources + 0.2 * signs).clamp(0, 1)
    return errors(sources).detach()


def test_each_row_has_its_worst_masks(by_hand: ByHand) -> None:
    start = by_hand.ctx.noise.uniform("masks", (8, 14)).double()
    found = by_hand.term("adversarial", adversarial=ADVERSARY)
    assert_close(found, ascent(by_hand, start, ADVERSARY["steps"]).sum())


def test_the_end_of_a_text_may_be_all_that_counts(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, ctx = objective_on(gpt_target, tmp_path)
    model, x = objective.model, batch["inputs"]
    alone = {**NOTHING, "stochastic": 1.0}
    last = changed(objective, **alone, positions="last")
    out = last(batch, None, ctx)
    target_out, inputs = model.probe(x, batch.get("documents"))
    gates = model.gate_logits(inputs).clamp(0, 1)
    width = model.total + len(model.names)
    draws = ctx.noise.uniform("masks", (len(x), 1, 16, width)).double()
    masks = Masks.between(gates, draws)
    kept: list[Tensor] = []

    def keep(masked_out: Tensor, _: Tensor) -> Tensor:
        kept.append(masked_out)
        return masked_out

    errors(model, x, batch.get("documents"), target_out, masks, keep)
    wanted, found = (each[:, -1].log_softmax(-1) for each in (target_out, kept[0]))
    kl_B = (wanted.exp() * (wanted - found)).sum(-1)
    assert_close(out.loss / out.weight, kl_B.mean())
    everywhere = changed(objective, **alone)(batch, None, ctx)
    assert abs(everywhere.loss - out.loss) > 1e-6
