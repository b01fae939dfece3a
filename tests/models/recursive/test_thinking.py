"""Accuracy by thinking step: what the net would have answered had it stopped there."""

import json

import numpy as np
import pytest
import torch

from contract import IGNORE, Prediction, Report
from models.interval import Interval
from models.recursive.thinking import ByStep, ThinkingSteps
from tests.models.recursive.test_act import batch_of, make

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


def reported() -> tuple[Report, dict[str, list[float]]]:
    everything, evaluator = batch(), ThinkingSteps()
    evaluator.add(np.arange(ROWS), everything, predicted(4, everything))
    report = evaluator.report(evaluator.rows())
    scene = json.loads(str(report.files["thinking_steps.scene.json"]))
    return report, {line["name"]: line["values"] for line in scene["lines"]}


def test_each_step_is_the_evaluation_of_a_net_that_stops_there() -> None:
    report, by_step = reported()
    for step in range(1, 5):
        alone = predicted(step, batch())
        means = {name: float(total / count) for name, (total, count) in alone.metrics.items()}
        counted = [row for row in range(ROWS) if row != 3]
        wants = (alone.outputs["q_halt_logits"][counted] >= 0).float().mean()
        found = [by_step[name][step - 1] for name in ("boards solved", "cells right")]
        assert found == pytest.approx([means["exact_accuracy"], means["accuracy"]], rel=1e-4)
        assert by_step["wants to halt"][step - 1] == pytest.approx(float(wants), rel=1e-4)
    exact = by_step["boards solved"]
    assert len(set(exact)) > 1, "all steps alike show nothing"
    assert report.metrics == pytest.approx(
        {
            "exact_accuracy_at_1": exact[0],
            "exact_accuracy_at_best": max(exact),
            "best_step": 1 + exact.index(max(exact)),
        },
        rel=1e-4,
    )
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


def test_an_accuracy_comes_with_its_interval() -> None:
    interval = Interval("solved")
    for solved, among in ((0, 0), (8, torch.tensor(9)), (0, 1)):  # counts may be ints
        counts = {"solved": (torch.tensor(solved), among)}
        interval.add(np.arange(int(among)), {}, Prediction(counts))
    found = interval.report(interval.rows()).metrics  # as statistics packages have it
    assert found == pytest.approx(
        {"solved_low": 0.490162, "solved_high": 0.943318, "solved_n": 10}, abs=1e-6
    )


def test_an_interval_counts_examples_not_their_parts() -> None:
    interval = Interval("right")
    right = torch.tensor(800), torch.tensor(1000)  # cells, of ten puzzles
    interval.add(np.arange(10), {}, Prediction({"right": right}))
    found = interval.report(interval.rows()).metrics
    assert found == pytest.approx(
        {"right_low": 0.490162, "right_high": 0.943318, "right_n": 10}, abs=1e-6
    )
