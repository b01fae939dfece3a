"""A net whose outputs are overwritten, as those of a replayed CUDA graph are, trains and predicts
as one whose outputs stay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.recursive.act import ActObjective
from tests.models.recursive.test_act import batch_of, make, steps


class Replayed:
    """A stand-in for a net compiled with CUDA graphs: each new round overwrites what it returned
    before.
    """

    def __init__(self) -> None:
        self.rounds, self.modes, self._returned = 0, [], []

    def begin_round(self) -> None:
        self.rounds += 1
        for tensor in self._returned:
            tensor.fill_(float("nan"))
        self._returned.clear()

    def compile(self, net: Any, **options: Any) -> None:
        forward = net.forward
        self.modes.append(options["mode"])

        def noted(*given: Any) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
            if given[3].requires_grad:
                # of the backward's graph
                given[3].register_hook(lambda grad: self._returned.append(grad.detach()))
            state, logits, q = forward(*given)
            self._returned += [*state, logits.detach(), q.detach()]
            return state, logits, q

        net.forward = noted


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    graphs = Replayed()
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda net, **options: graphs.compile(net, **options)
    )
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", graphs.begin_round)
    return graphs


def trained(objective: ActObjective) -> list[Tensor]:
    """Gradients of some steps and of their rows, what was carried to the end, and a prediction."""
    outs = []
    for step in range(3):
        outs = steps(objective, [batch_of(8, seed) for seed in range(step + 1)])
        outs[-1].loss.backward()
    predicted = objective.predict(batch_of(8)).outputs["logits"].detach().clone()
    rows = [grad for _, grad in objective.model.inner.puzzle_emb.row_grads()]
    return [*(p.grad for p in objective.parameters()), *rows, *outs[-1].carry.state, predicted]


@pytest.mark.parametrize("name", ["trm", "hrm"])  # hrm calls its net twice a step
def test_what_is_needed_outlives_its_round(name: str, replayed: Replayed) -> None:
    plain, graphed = make(name), make(name)
    graphed.compile_net(graphs=True)
    assert replayed.modes == ["reduce-overhead"]
    for a, b in zip(trained(plain), trained(graphed), strict=True):
        assert torch.equal(a, b)
    assert replayed.rounds == 1 + 2 + 3 + 1, "one for every step and every prediction"
