"""Accuracy by thinking step: what the net would have answered had it stopped there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from models.interval import Interval
from models.recursive.thinking import MOST_RECORDED, ByStep, ThinkingSteps
from tests.models.recursive.test_act import batch_of, make
from utils.measure.evaluator import Prediction, Report
from utils.spec import IGNORE

ROWS, PADDING = 40, 8


def batch() -> dict[str, torch.Tensor]:
    """Few values, so that even this net solves some boards; one row is without labels, and the last
    ones are padding.
    """
    made = batch_of(ROWS + PADDING)
    made["labels"] = made["labels"] % 2 + 2
    made["labels"][:, 2:] = IGNORE
    made["labels"][[3, *range(ROWS, ROWS + PADDING)]] = IGNORE
    return made


def predicted(steps: int, rows: dict[str, torch.Tensor]) -> Prediction:
    objective = make("trm", halt_max_steps=steps).eval()
    with torch.no_grad():
        return objective.predict(rows)


def reported(shares: list[slice]) -> tuple[Report, dict[str, list[float]]]:
    """By as many ranks as there are shares of the batch; the padding is in the last one."""
    everything, gathered = batch(), []
    for share in shares:
        evaluator, rows = (
            ThinkingSteps(),
            {key: tensor[share] for key, tensor in everything.items()},
        )
        evaluator.add(np.arange(ROWS)[share], rows, predicted(4, rows))
        gathered.append(evaluator.rows())
    report = ThinkingSteps().report(
        {name: torch.cat([rows[name] for rows in gathered]) for name in gathered[0]}
    )
    return report, json.loads(str(report.files["thinking_steps.json"]))


def test_each_step_is_the_evaluation_of_a_net_that_stops_there() -> None:
    report, by_step = reported([slice(None)])
    for step in range(1, 5):
        metrics = {
            name: float(total / count)
            for name, (total, count) in predicted(step, batch()).metrics.items()
        }
        assert by_step["exact_accuracy"][step - 1] == pytest.approx(metrics["exact_accuracy"])
        assert by_step["cell_accuracy"][step - 1] == pytest.approx(metrics["accuracy"])
        q_halt = predicted(step, batch()).outputs["q_halt_logits"]
        counted = torch.arange(ROWS + PADDING).lt(ROWS) & torch.arange(ROWS + PADDING).ne(3)
        assert by_step["halting"][step - 1] == pytest.approx(
            float((q_halt[counted] >= 0).float().mean())
        )
    exact = by_step["exact_accuracy"]
    assert len(set(exact)) > 1, "all steps alike show nothing"
    assert report.metrics == {
        "exact_accuracy_at_1": exact[0],
        "exact_accuracy_at_best": max(exact),
        "best_step": 1 + exact.index(max(exact)),
    }
    assert tuple(report.metrics) == tuple(ThinkingSteps.scalars)


def test_fixed_and_broken_cells_and_the_halting_step_of_a_board_made_by_hand() -> None:
    labels = torch.tensor([[2, 2, 3, IGNORE], [IGNORE] * 4])
    said = [[2, 3, 3, 1], [3, 2, 3, 1], [2, 2, 3, 0]]
    seen = ByStep(labels, 5)
    for step, (answer, margin) in enumerate(zip(said, (-1.0, 0.5, -2.0), strict=True)):
        logits = torch.nn.functional.one_hot(torch.tensor([answer, answer]), 4).float()
        seen.add(logits, torch.tensor([step - 1.0, 9.0]), torch.tensor([margin, -1.0]))
    outputs = seen.outputs()
    # two steps fewer than there could be: nothing changes in them
    assert outputs["right_by_step"].tolist() == [[2, 2, 3, 3, 3], [0] * 5]
    assert outputs["fixed_by_step"].tolist() == [[0, 1, 1, 0, 0], [0] * 5]
    assert outputs["broken_by_step"].tolist() == [[0, 1, 0, 0, 0], [0] * 5]
    assert outputs["q_halt_by_step"][0].tolist() == [-1, 0, 1, 1, 1]
    assert outputs["answer_by_step"][0].tolist() == [*said, said[2], said[2]]
    assert outputs["halt_margin_by_step"][0].tolist() == [-1, 0.5, -2, -2, -2]
    assert outputs["halt_step"].tolist() == [2, 0]
    assert seen.outputs(torch.tensor([3, 1]))["halt_step"].tolist() == [3, 1]


def test_of_many_steps_only_some_answers_are_kept() -> None:
    seen = ByStep(torch.zeros(1, 2, dtype=torch.long), 1000)
    for step in range(1000):
        logits = torch.nn.functional.one_hot(torch.tensor([[step % 3, 0]]), 300)
        seen.add(logits, torch.zeros(1), torch.zeros(1))
    outputs = seen.outputs()
    assert outputs["answer_by_step"].shape == (1, MOST_RECORDED, 2)
    assert outputs["answer_by_step"][0, -1, 0] == 999 % 3
    assert outputs["right_by_step"].shape == (1, 1000)


def test_scenes_count_what_the_batch_holds() -> None:
    report, by_step = reported([slice(None)])
    scenes = {name: json.loads(text) for name, text in report.files.items() if ".scene." in name}
    lines = {line["name"]: line["values"] for line in scenes["thinking_steps.scene.json"]["lines"]}
    assert lines["boards solved"] == pytest.approx(by_step["exact_accuracy"], rel=1e-4)
    halting = scenes["thinking_steps_halting.scene.json"]
    assert halting["x"]["values"] == [1, 2, 3, 4, "never"]
    solved, unsolved = (each["values"] for each in halting["series"])
    assert sum(solved) + sum(unsolved) == ROWS - 1
    assert sum(solved) == pytest.approx(by_step["exact_accuracy"][-1] * (ROWS - 1))
    cells = scenes["thinking_steps_cells.scene.json"]
    fixed, broken = (each["values"] for each in cells["series"])
    gained = (sum(fixed) - sum(broken)) * (ROWS - 1)
    rise = by_step["cell_accuracy"][-1] - by_step["cell_accuracy"][0]
    assert gained == pytest.approx(rise * 2 * (ROWS - 1), abs=1e-2)  # two labels a row


@pytest.mark.slow
def test_ranks_change_nothing() -> None:
    assert reported([slice(None)]) == reported([slice(0, 5), slice(5, 30), slice(30, None)])


def test_nothing_seen_is_an_empty_report() -> None:
    assert ThinkingSteps().rows() == {}
    assert ThinkingSteps().report({}) == Report()
    assert Interval("exact_accuracy").report(Interval("exact_accuracy").rows()) == Report()
    assert [type(evaluator) for evaluator in make("trm", halt_max_steps=1).evaluators({})] == [
        Interval
    ]
    assert [type(evaluator) for evaluator in make("trm").evaluators({})] == [
        Interval,
        ThinkingSteps,
    ]


@pytest.mark.parametrize(  # as statistics packages have it
    ("successes", "among", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (0, 20, 0.0, 0.161125),
        (20, 20, 0.838875, 1.0),
        (1, 1, 0.206549, 1.0),
    ],
)
def test_an_accuracy_comes_with_its_interval(
    successes: int, among: int, low: float, high: float
) -> None:
    gathered = []
    for share in ((0, 0), (successes, among - 1), (0, 1)):
        interval = Interval("solved")
        interval.add(
            np.arange(3),
            {},
            Prediction({"solved": (torch.tensor(share[0]), torch.tensor(share[1]))}),
        )
        gathered.append(interval.rows()["counts"])
    metrics = Interval("solved").report({"counts": torch.cat(gathered)}).metrics
    for end in (low, high):  # shares from which what was seen is just so far away
        if 0 < end < 1:
            assert (successes / among - end) ** 2 == pytest.approx(
                3.841459 * end * (1 - end) / among, rel=1e-4
            )
    assert metrics == {
        "solved_low": pytest.approx(low, abs=1e-6),
        "solved_high": pytest.approx(high, abs=1e-6),
        "solved_n": among,
    }
