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
from tests.models.decomposition.test_components import changed, objective_on
from utils.errors import ConfigError
from utils.noise import Noise
from utils.spec import IGNORE

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
        self.said = self.out(self.x @ self.W, self.W.t())

    def out(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        return torch.relu(hidden @ matrix + self.b)

    def first(self, m: Tensor, rest: Tensor | None = None) -> Tensor:
        """What the first matrix gives under masks of its components and of what they leave."""
        y = ((self.x @ self.V) * m) @ self.U
        return y if rest is None else y + rest * (self.x @ (self.W - self.V @ self.U))

    def second(self, hidden: Tensor, m: Tensor, rest: Tensor | None = None) -> Tensor:
        y = ((hidden @ self.U.t()) * m) @ self.V.t()
        if rest is not None:
            y = y + rest * (hidden @ (self.W - self.V @ self.U).t())
        return torch.relu(y + self.b)

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


def test_masks_equal_to_gates_in_one_matrix_at_a_time(by_hand: ByHand) -> None:
    h, g = by_hand, by_hand.gates
    first = h.error(h.out(h.first(g[:, :C]), h.W.t()))
    second = h.error(h.second(h.x @ h.W, g[:, C:]))
    expected = (first.sum() + second.sum()) / 2
    assert_close(h.term("masked_layerwise", masked_layerwise=1.0), expected.detach())
    # two losses that mask one matrix at a time share their passes
    both = changed(h.objective, **{**NOTHING, "layerwise": 1.0}, masked_layerwise=1.0)
    alone = changed(h.objective, **{**NOTHING, "layerwise": 1.0})
    metrics = both(h.batch, None, h.ctx).metrics
    assert_close(metrics["masked_layerwise"][0], expected.detach())
    assert_close(metrics["layerwise"], alone(h.batch, None, h.ctx).metrics["layerwise"])


@pytest.mark.parametrize("probability", [None, 0.3])
def test_masks_equal_to_gates_in_some_matrices(by_hand: ByHand, probability: float | None) -> None:
    h, noise = by_hand, by_hand.ctx.noise
    drawn = noise.uniform("masked subset", (8, 1, 2))[:, 0].double()
    if probability is None:
        both = noise.uniform("masked subset size", (8, 1)) >= 0.5
        chosen = (drawn == drawn.min(1, keepdim=True).values) | both
    else:
        chosen = drawn < probability
    assert 0 < chosen.sum() < 16
    one, two = chosen[:, :1], chosen[:, 1:]
    hidden = torch.where(one, h.first(h.gates[:, :C]), h.x @ h.W)
    out = torch.where(two, h.second(hidden, h.gates[:, C:]), h.out(hidden, h.W.t()))
    found = h.term("masked_subset", masked_subset=1.0, subset_probability=probability)
    assert_close(found, h.error(out).sum().detach())


def test_hidden_compares_what_matrices_read(by_hand: ByHand) -> None:
    h = by_hand
    draws = h.ctx.noise.uniform("masks", (8, 2, 2 * C + 2)).double()  # two samples
    means = []
    for sample in draws.unbind(1):
        m = h.gates[:, :C] + (1 - h.gates[:, :C]) * sample[:, :C]
        change = h.first(m, sample[:, 2 * C, None]) - h.x @ h.W
        # 5 numbers that the first matrix reads, always the same, and 2 that the second does
        means.append(change.square().sum() / 7)
    assert_close(h.term("hidden", hidden=1.0, samples=2), torch.stack(means).mean().detach())


def ascent(h: ByHand, start: Tensor, steps: int, shared: bool) -> Tensor:
    """The error of each row under the worst sources [rows or 1, 12, or 14 with those of what
    components leave], by plain differences.
    """

    def errors(sources: Tensor) -> Tensor:
        m = h.gates + (1 - h.gates) * sources[:, : 2 * C]
        rest = (sources[:, 12:13], sources[:, 13:]) if sources.shape[1] > 12 else (None, None)
        return h.error(h.second(h.first(m[:, :C], rest[0]), m[:, C:], rest[1]))

    def slope(sources: Tensor, number: int) -> Tensor:
        up, down = sources.clone(), sources.clone()
        up[:, number] += 1e-6
        down[:, number] -= 1e-6
        change = errors(up) - errors(down)
        return change.sum() if shared else change

    sources = start.clone()
    for _ in range(steps):
        slopes = [slope(sources, number) for number in range(sources.shape[1])]
        signs = torch.stack([torch.where(s.abs() < 1e-13, 0, s.sign()) for s in slopes], -1)
        sources = (sources + 0.2 * signs).clamp(0, 1)
    return errors(sources).detach()


ADVERSARY = {"coefficient": 1.0, "steps": 2, "rate": 0.2, "persistent": False}


@pytest.mark.parametrize("init", ["random", "ones", "zeroes"])
def test_each_row_has_its_worst_masks(by_hand: ByHand, init: str) -> None:
    # with open masks of everything there is no error, and no direction of ascent
    whole = init != "ones"
    start = by_hand.ctx.noise.uniform("masks", (8, 12 + 2 * whole)).double()
    start = start if init == "random" else torch.full_like(start, float(init == "ones"))
    found = by_hand.term("adversarial", adversarial={**ADVERSARY, "init": init}, whole=whole)
    assert_close(found, ascent(by_hand, start, 2, shared=False).sum())


def test_all_rows_of_a_batch_may_share_the_worst_masks(by_hand: ByHand) -> None:
    """In two micro-batches, which know of each other by sums alone, one for each step of ascent."""
    h = by_hand
    objective = changed(h.objective, **NOTHING, adversarial={**ADVERSARY, "scope": "batch"})
    halves = [
        {name: rows[part] for name, rows in h.batch.items()} for part in (slice(3), slice(3, 8))
    ]
    contexts = [Context(0.0, Noise(0, 0, [shard])) for shard in (0, 1)]
    totals: dict[str, Tensor] = {}
    for _ in range(objective.rounds()):
        sums = [
            objective.statistics(half, None, Context(0.0, ctx.noise, totals))
            for half, ctx in zip(halves, contexts, strict=True)
        ]
        totals = totals | {name: sums[0][name] + sums[1][name] for name in sums[0]}
    found = [
        objective(half, None, Context(0.0, ctx.noise, totals)).metrics["adversarial"][0]
        for half, ctx in zip(halves, contexts, strict=True)
    ]
    start = Noise(0, 0, [0]).uniform("shared masks", (1, 14)).double()
    assert_close(torch.stack(found).sum(), ascent(h, start, 2, shared=True).sum())


@pytest.mark.parametrize("scope", ["row", "batch"])
def test_evaluations_tell_the_error_under_the_worst_masks(by_hand: ByHand, scope: str) -> None:
    """Rows that pad a batch have no say in the masks that all share."""
    h = by_hand
    adversarial = {**ADVERSARY, "coefficient": 0.0, "init": "zeroes", "scope": scope, "evaluate": 3}
    objective = changed(h.objective, adversarial=adversarial)
    labels = torch.zeros(8)
    with torch.no_grad():
        found = objective.predict({**h.batch, "labels": labels}).metrics["mse_adversarial"]
        shared = scope == "batch"
        expected = ascent(h, torch.zeros(1 if shared else 8, 14).double(), 3, shared)
        assert_close(found[0], expected.sum())
        padded = {"inputs": torch.cat((h.batch["inputs"], torch.ones(3, 5))), "labels": labels}
        padded["labels"] = torch.cat((labels, torch.full((3,), IGNORE)))
        assert_close(objective.predict(padded).metrics["mse_adversarial"][0], expected.sum())
    assert (
        "mse_adversarial" not in changed(h.objective).predict({**h.batch, "labels": labels}).metrics
    )


@pytest.mark.parametrize(
    ("adversarial", "says"),
    [
        ({"scope": "all"}, "scope=all: choose row"),
        ({"init": "half"}, "init=half: choose one of random, ones, zeroes"),
        (
            {"scope": "batch", "persistent": True},
            "persistent=true: continues from the masks of each row",
        ),
    ],
)
def test_what_an_adversary_cannot_be(by_hand: ByHand, adversarial: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        changed(by_hand.objective, adversarial={**ADVERSARY, **adversarial})


def test_embeddings_alone_have_no_hidden_activations(gpt_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="those of embeddings are indices"):
        objective_on(gpt_target, tmp_path, "arch.modules=[embed_tokens]", "arch.loss.hidden=1")


def test_the_end_of_a_text_may_be_all_that_counts(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, ctx = objective_on(gpt_target, tmp_path)
    model, x = objective.model, batch["inputs"]
    last = changed(objective, **NOTHING, masked=1.0, positions="last")
    out = last(batch, None, ctx)
    target_out, inputs = model.probe(x, batch.get("documents"))
    gates = model.lower_gates(model.gate_logits(inputs))
    masks = Masks(gates.unsqueeze(1))
    kept: list[Tensor] = []

    def keep(masked_out: Tensor, _: Tensor) -> Tensor:
        kept.append(masked_out)
        return masked_out

    errors(model, x, batch.get("documents"), target_out, masks, keep)
    wanted, found = (each[:, -1].log_softmax(-1) for each in (target_out, kept[0]))
    kl_B = (wanted.exp() * (wanted - found)).sum(-1)
    assert_close(out.loss / out.weight, kl_B.mean())
    everywhere = changed(objective, **NOTHING, masked=1.0)(batch, None, ctx)
    assert abs(everywhere.loss - out.loss) > 1e-6
