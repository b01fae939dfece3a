"""The net that halts at its fixed point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from contract import Noise
from tests.making import make_objective
from tests.models.recursive.slots import steps
from tests.models.recursive.test_act import SIZES, SPEC, batch_of


def make(**keys: Any) -> Any:
    sizes = SIZES | {"H_cycles": 1, "puzzle_emb_len": 1, "forward_dtype": "float64"}
    return make_objective("fprm", SPEC, **sizes | keys).double()


@torch.no_grad()
def test_without_branches_it_converges_to_a_share_of_the_input() -> None:
    """z = k (a z + (1 - a k) x) has the solution k x, with k what all branches leave over."""
    model = make(
        conv_kernel_size=0, L_layers=3, L_cycles=1, alpha_1_init=0.9, alpha_2_init=0.9
    ).model
    inner, batch = model.inner, batch_of(5)
    for name, weight in inner.named_parameters():
        if "down_proj" in name or "o_proj" in name:
            weight.zero_()
    inner.puzzle_emb.weights.normal_()  # zero at first, and then nothing is relative to it
    kept, state_share = 0.9**6, 0.9
    x = inner.embed(batch["inputs"], model.puzzle_rows(batch["puzzle_identifiers"]))
    state, halting = model.fresh_state(Noise(0, 0, [0]), *batch["inputs"].shape), []
    for _ in range(16):
        before = state[0]
        rows = model.puzzle_rows(batch["puzzle_identifiers"])
        state, _, q = model(state, batch["inputs"], rows)
        expected = kept * (state_share * before + (1 - kept * state_share) * x)
        assert_close(state[0], expected)
        change = (state[0] - before).abs().amax(-1) / state[0].abs().amax(-1)
        assert_close(q[:, 0].exp(), 0.1 / change.amax(-1), rtol=1e-4, atol=0)
        halting.append(model.wants_to_halt(q))
    assert_close(state[0], kept * x, rtol=1e-3, atol=1e-3)
    assert not halting[0].any()
    assert halting[-1].all()


@pytest.mark.parametrize("mlp_t", [False, True])
def test_slots_halt_where_they_converge_and_all_weights_train(mlp_t: bool) -> None:
    objective = make(mlp_t=mlp_t, fixed_point=0.3, halt_exploration_prob=0.0, H_cycles=2)
    seen: list[torch.Tensor] = []
    objective.model.inner.register_forward_hook(lambda *given: seen.append(given[2][2][:, 0]))
    outs = steps(objective, [batch_of(32, seed) for seed in range(4)])
    for out, margin in zip(outs, seen, strict=True):
        assert not margin.requires_grad, "halting is not learned"
        assert torch.equal(out.carry.halted, (margin > 0) | (out.carry.steps == 4))
    early = [int((out.carry.halted & (out.carry.steps < 4)).sum()) for out in outs]
    assert 0 < sum(early) < 4 * 32, "all or none converged: the test shows nothing"
    outs[-1].loss.backward()
    for name, weight in objective.named_parameters():
        assert float(weight.grad.abs().max()) > 0, name


def test_puzzles_leave_an_evaluation_at_the_fixed_point() -> None:
    def taken(**keys: Any) -> list[int]:
        return make(**keys).eval().predict(batch_of(20)).outputs["halt_step"].tolist()

    assert len(set(taken(fixed_point=0.3, halt_max_steps=8))) > 1
    assert taken(fixed_point=1e-7) == [4] * 20
