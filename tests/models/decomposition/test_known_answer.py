"""What evaluations say of components, by values that can be worked out by hand."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract import Report
from models.decomposition.known_answer import (
    dense_error,
    gates_scene,
    identity_error,
    likeness,
    matched,
    verdict,
)
from models.decomposition.usage import TOP, _measured
from tests.models.decomposition.test_components import changed, objective_on
from utils.errors import ConfigError
from utils.measure.scene import MOST


def test_gates_are_compared_with_the_identity_in_any_order() -> None:
    gates = np.array([[0.02, 0.95, 0, 0], [0, 0, 0, 1], [1, 0.05, 0, 0]])
    features, components = matched(gates)
    assert components[np.argsort(features)].tolist() == [1, 3, 0]
    assert identity_error(gates, features, components) == 0
    gates[1] = [0, 0, 0.3, 0.8]  # one open that should not be, one that should be wider
    assert identity_error(gates, *matched(gates)) == 2


def test_dense_components_are_counted() -> None:
    gates = np.array([[1, 0.5, 0, 0], [1, 0.5, 0, 0.05], [0, 1, 0, 0]])
    assert dense_error(gates, 2) == 0
    assert dense_error(gates, 1) == 3, "of one too many, gates are open for three features"
    assert dense_error(gates, 3) == 1, "the third is needed by none"
    assert dense_error(gates, 6) == 2 + 2, "two too few, and two that nothing needs"


def test_likeness_is_of_direction_and_length() -> None:
    weights = np.array([[2.0, 0], [0, 1.0]])
    written = np.array([[0, -1.0], [3.0, 0]])  # the first reads feature 1 the other way round
    read = np.array([[0, 0.5], [-1.0, 0]])
    found = likeness(weights, read, written)
    assert found == pytest.approx({"mmcs": 1.0, "ml2r": (0.5 * 3 / 2 + 1) / 2})
    turned = likeness(weights, -read, written)
    assert turned["mmcs"] == pytest.approx(0.0), "what points the other way is not alike"
    assert likeness(weights, read[:, :0], written[:0]) == {"mmcs": 0.0, "ml2r": 0.0}


def test_contexts_are_the_tokens_around() -> None:
    tokens = torch.tensor([[10, 11, 12], [20, 21, 22]])
    gates = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.5, 0.0]]).unsqueeze(-1)
    counted = torch.tensor([[True, True, True], [True, False, True]])
    found = _measured(gates, gates > 0.1, tokens, torch.tensor([4, 5]), counted.nonzero(), (1, 1))
    assert found["what"][0, :5].tolist() == [20, 12, 11, 10, 22]
    assert found["value"][0, :5].tolist() == pytest.approx([0.9, 0.3, 0.2, 0.1, 0])
    assert found["around"][0, :3].tolist() == [[-1, 20, 21], [11, 12, -1], [10, 11, 12]]
    assert found["value"][0, 5:].tolist() == [-1] * (TOP - 5)
    assert found["around"][0, 5:].tolist() == [[-1] * 3] * (TOP - 5)


def usage_on(objective: Any, batch: dict[str, Any]) -> Report:
    """What an evaluation of these examples reports."""
    (usage,) = objective.evaluators(batch)
    with torch.no_grad():
        usage.add(np.arange(len(batch["inputs"])), batch, objective.predict(batch))
    return usage.report(usage.rows())


def test_the_table_of_a_toy_model(tms_target: Path, tmp_path: Path) -> None:
    objective, _, _ = objective_on(tms_target, tmp_path)
    with torch.no_grad():  # component 1 is needed by what reads it, 4 by nothing
        objective.model.gates.outward_bias_K[:] = 0.5
        objective.model.gates.outward_KH[:] = 0
        objective.model.gates.outward_bias_K[[4, 10]] = -1e9
    rows = torch.eye(5, dtype=torch.float64) * 0.75
    report = usage_on(objective, {"inputs": rows, "labels": torch.zeros(5)})
    table = str(report.files["components.tsv"]).splitlines()
    *head, features = table[1].split("\t")
    assert head == ["linear1", "0", "1.000000", "0.500000"]
    assert sorted(features.split(", ")) == ["0 0.50", "1 0.50", "2 0.50", "3 0.50", "4 0.50"]
    assert table[5].split("\t") == ["linear1", "4", "0.000000", "0.000000", ""]
    shown = json.loads(report.files["live_components_table.scene.json"])["rows"]
    assert [row[:3] for row in shown[:5]] == [["linear1", c, 1] for c in (0, 1, 2, 3, 5)]


def test_the_table_of_a_language_model(gpt_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(gpt_target, tmp_path, r"arch.modules=['layers\..*']")
    report = usage_on(objective, batch)
    lines = [line.split("\t") for line in str(report.files["components.tsv"]).splitlines()]
    assert lines[0] == ["matrix", "component", "live", "mean gate", "top tokens", "contexts"]
    dead = [line for line in lines[1:] if float(line[2]) == 0]
    assert all(line[4:] == ["", ""] for line in dead)
    needed = next(line for line in lines[1:] if float(line[2]) > 0)
    assert re.match(r'".+" [01]\.\d\d', needed[4])
    assert re.match(r'".*\[\[.+\]\].*"', needed[5])
    shown = json.loads(report.files["live_components_table.scene.json"])["rows"]
    assert {row[0] for row in shown} == set(objective.model.names)
    assert all(row[2] > 0 and "[[" in row[5] for row in shown)


def test_the_last_line_says_whether_the_answer_is_the_known_one() -> None:
    live = {"W": 5, "U": 1}
    said = verdict(live, {"identity_error/W": 0.0, "dense_error/U": 0.0})
    assert "answer: found (W 5 live components, identity error 0; U 1 live component, d" in said
    assert "answer: NOT found (W 5 live" in verdict(live, {"identity_error/W": 3.0})
    assert "answer: none is given (W 5 live" in verdict(live, {"mmcs/W": 1.0})


def test_a_set_of_single_features_has_other_metrics(tms_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(tms_target, tmp_path)
    made = changed(objective, known={"identity": ["linear1"], "dense": [], "components": None})
    for row, kinds in (
        ({"single": 1, "labels": 1}, ["KnownAnswer"]),
        ({"labels": 1}, ["Usage"]),
        ({"inputs": 1}, []),
    ):
        assert [type(evaluator).__name__ for evaluator in made.evaluators(row)] == kinds
    assert not objective.predict({"inputs": batch["inputs"]}).outputs, (
        "of examples that nobody counts there is nothing to say"
    )
    with pytest.raises(ConfigError, match=r"known\.components=null: say how many"):
        changed(objective, known={"identity": [], "dense": ["linear2"], "components": None})


def test_gates_on_the_page_keep_the_numbers_of_their_components() -> None:
    gates = {"W": np.array([[1, 0, 0.5, 0, 0], [0, 1, 0, 0, 0.2]])}
    made = gates_scene(gates, {"W": np.array([4, 2, 0, 1, 3])})
    (panel,) = json.loads(made["gates.scene.json"])["panels"]
    assert panel == {
        "name": "W",
        "rows": [0, 1],
        "columns": [4, 2, 0, 1],  # twice as many as features
        "levels": ["/AgA", "A/AA"],
    }
    large = {str(number): np.ones((300, 900)) for number in range(12)}
    (file,) = gates_scene(large, {name: np.arange(900) for name in large}).values()
    assert len(file) <= MOST
    assert json.loads(file)["panels"]
