"""Answers where puzzles leave the batch early, and where several chains think about each."""

from __future__ import annotations

import pytest
import torch

from models.recursive.answering import answers_by_step
from tests.models.recursive.test_act import batch_of, make

STEPS = 6


def objective(name: str, **keys):
    """In float64, where a row's numbers do not depend on how many others are computed beside it."""
    made = make(name, halt_max_steps=STEPS, forward_dtype="float64", **keys).double().eval()
    # calmer layers than those of a net that has learned nothing, or no answer would ever stay
    with torch.no_grad():
        for name, weight in made.model.inner.named_parameters():
            weight.mul_(0.5 if "level" in name else 1.0)
        made.model.inner.q_head.bias[0] = 1.0
    return made


def part(batch: dict[str, torch.Tensor], rows) -> dict[str, torch.Tensor]:
    return {key: tensor[rows] for key, tensor in batch.items()}


def alone(model, puzzle: dict[str, torch.Tensor], hrm: bool):
    """Returns one puzzle's answer by the rule: think until the net wants to halt and repeats its
    answer.
    """
    state, said, step = model.fresh_state(*puzzle["inputs"].shape), None, 0
    for _ in range(STEPS):
        state, logits, q = model(
            state,
            puzzle["inputs"],
            model.puzzle_rows(puzzle["puzzle_identifiers"]),
            model.weights_in_dtype(),
        )
        before, said, step = said, logits.argmax(-1), step + 1
        if before is not None and torch.equal(before, said) and q[0, 0] > (q[0, 1] if hrm else 0):
            break
    return logits, q, step


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["trm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trm_mlp", "hrm_learned"))],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_puzzle_that_leaves_early_has_the_answer_that_it_has_alone(
    name: str, compiled: bool
) -> None:
    net, batch = objective(name, eval_halt=True), batch_of(40)
    net.model.compiled = compiled  # which keeps fewer sizes of batches
    seen = []
    net.model.inner.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    prediction = net.predict(batch)
    sizes, expected = (
        [*seen],
        [alone(net.model, part(batch, [row]), name != "trm") for row in range(40)],
    )
    taken = [step for *_, step in expected]
    assert len(set(taken)) > 2, "all puzzles took the same number of steps: the test shows nothing"
    torch.testing.assert_close(
        prediction.outputs["logits"], torch.cat([logits for logits, *_ in expected])
    )
    torch.testing.assert_close(
        prediction.outputs["q_halt_logits"], torch.cat([q[:, 0] for _, q, _ in expected])
    )
    assert [int(number) for number in prediction.metrics["steps"]] == [sum(taken), 40]
    assert prediction.outputs["right_by_step"].shape == (40, STEPS)
    late = torch.tensor(taken).clamp_max(STEPS - 1)
    assert (
        prediction.outputs["right_by_step"][torch.arange(40), late]
        == prediction.outputs["right_by_step"][:, -1]
    ).all()
    thought_about = [sum(step > done for step in taken) for done in range(max(taken))]
    assert (
        sizes == [min(s for s in (40, 20, 10, 5) if s >= n) for n in thought_about]
        if compiled
        else thought_about
    )


@torch.no_grad()
def test_all_steps_are_as_before_where_nobody_may_leave() -> None:
    net, batch = objective("trm"), batch_of(12)
    state, rows = (
        net.model.fresh_state(*batch["inputs"].shape),
        net.model.puzzle_rows(batch["puzzle_identifiers"]),
    )
    for _ in range(STEPS):
        state, logits, q = net.model(state, batch["inputs"], rows, net.model.weights_in_dtype())
    outputs = net.predict(batch).outputs
    assert torch.equal(outputs["logits"], logits)
    assert torch.equal(outputs["q_halt_logits"], q[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("halts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_surest_chain_answers_whatever_the_batch(halts: bool) -> None:
    """Chains are a puzzle's own: in other company, and in another place, it has the same ones."""
    net, batch = (
        objective("hrm", chains=5, chain_noise=1.0, chain_seed=7, eval_halt=halts),
        batch_of(24),
    )
    whole = net.predict(batch).outputs
    shares = [
        net.predict(part(batch, rows)).outputs
        for rows in (slice(20, None), slice(0, 7), slice(7, 20))
    ]
    torch.testing.assert_close(
        torch.cat([shares[1]["logits"], shares[2]["logits"], shares[0]["logits"]]), whole["logits"]
    )
    one = objective("hrm", eval_halt=halts).predict(batch).outputs
    silent = objective("hrm", chains=5, chain_noise=0.0, eval_halt=halts).predict(batch).outputs
    torch.testing.assert_close(silent["logits"], one["logits"])
    other = (
        objective("hrm", chains=5, chain_noise=1.0, chain_seed=8, eval_halt=halts)
        .predict(batch)
        .outputs
    )
    assert not torch.equal(other["logits"], whole["logits"])
    if not halts:  # the first chain is the one without noise
        surer = whole["q_halt_logits"] > one["q_halt_logits"] + 1e-9
        assert 0 < surer.sum() < 24
        torch.testing.assert_close(whole["logits"][~surer], one["logits"][~surer])
        assert (whole["logits"][surer] - one["logits"][surer]).abs().amax((1, 2)).min() > 1e-9


@torch.no_grad()
def test_chains_speak_by_turns() -> None:
    """At each step the chain speaks whose halting logit is highest then."""
    net, batch = objective("trm", chains=4), batch_of(30)
    single = [
        answers_by_step(objective("trm").model, batch),
        answers_by_step(net.model, batch),
    ]
    for (_, q_one, _), (_, q_many, _) in zip(*single, strict=True):
        assert (q_many[:, 0] >= q_one[:, 0] - 1e-12).all()
