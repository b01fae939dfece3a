"""Answers where puzzles leave the batch early, and those of several chains of thought."""

import zlib

import pytest
import torch
from torch.testing import assert_close

from contract import Noise
from tests.models.recursive.slots import rows_of
from tests.models.recursive.test_act import batch_of, make

STEPS = 6


def objective(name: str, **keys):
    """In float64, where a row's numbers do not depend on how many others are computed beside it."""
    made = make(name, halt_max_steps=STEPS, forward_dtype="float64", **keys).eval()
    # calmer layers than those of a net that has learned nothing, or no answer would ever stay
    with torch.no_grad():
        for name, weight in made.model.inner.named_parameters():
            weight.mul_(0.5 if "level" in name else 1.0)
        made.model.inner.q_head.bias[0] = 1.0
    return made


def alone(model, puzzle: dict[str, torch.Tensor], hrm: bool):
    """Returns one puzzle's answer by the rule: think until the net wants to halt and repeats its
    answer.
    """
    state, said, step = model.fresh_state(Noise(0, 0, [0]), *puzzle["inputs"].shape), None, 0
    for _ in range(STEPS):
        rows = model.puzzle_rows(puzzle["puzzle_identifiers"])
        state, logits, q = model(state, puzzle["inputs"], rows)
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
    net.model.inner.register_forward_pre_hook(lambda module, given: seen.append(len(given[1])))
    prediction = net.predict(batch)
    sizes = [*seen]
    expected = [alone(net.model, rows_of(batch, [row]), name != "trm") for row in range(40)]
    taken = [step for *_, step in expected]
    assert len(set(taken)) > 2, "all puzzles took the same number of steps: the test shows nothing"
    assert_close(prediction.outputs["logits"], torch.cat([logits for logits, *_ in expected]))
    assert_close(prediction.outputs["q_halt_logits"], torch.cat([q[:, 0] for _, q, _ in expected]))
    assert [int(number) for number in prediction.metrics["steps"]] == [sum(taken), 40]
    assert prediction.outputs["right_by_step"].shape == (40, STEPS)
    late = torch.tensor(taken).clamp_max(STEPS - 1)
    right_BS = prediction.outputs["right_by_step"]
    assert torch.equal(right_BS[torch.arange(40), late], right_BS[:, -1])
    thought_about = [sum(step > done for step in taken) for done in range(max(taken))]
    if compiled:
        thought_about = [min(s for s in (40, 20, 10, 5) if s >= n) for n in thought_about]
    assert sizes == thought_about


@torch.no_grad()
@pytest.mark.parametrize("judge", ["halting", "residual"])
def test_the_best_of_several_chains_answers(judge: str) -> None:
    keys = {"chains": 5, "eval_noise": 0.5, "judge": judge, "random_start": judge == "residual"}
    net, batch = objective("trm", damping=0.1, **keys), batch_of(8)
    answers, chosen = net.predict(batch).outputs, set()
    for row in range(8):
        puzzle = rows_of(batch, [row] * 5)
        drawn = zlib.crc32(batch["inputs"][row].numpy().tobytes())
        state = net.model.fresh_state(Noise(0, 0, [drawn]), *puzzle["inputs"].shape)
        for step in range(STEPS):
            noise = net.model.path_noise(Noise(0, step, [drawn]), state, 0.5)
            rows = net.model.puzzle_rows(puzzle["puzzle_identifiers"])
            before = state
            state, logits, q = net.model(state, puzzle["inputs"], rows, noise)
        change = torch.cat([(z - old).flatten(1) for z, old in zip(state, before, strict=True)], 1)
        best = int(q[:, 0].argmax() if judge == "halting" else change.norm(dim=1).argmin())
        chosen.add(best)
        assert_close(answers["logits"][row], logits[best])
    assert len(chosen) > 2, "nearly always the same chain: the test shows nothing"
