"""Evaluations of components, against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.decomposition import pictures
from models.decomposition.anatomy import TOP, _measured, _merged
from models.decomposition.gates_scene import components_scene, gates_scene, live_scene
from models.decomposition.known_answer import dense_error, identity_error, likeness, matched
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


def test_features_without_a_component_are_errors() -> None:
    gates = np.array([[0, 0], [0, 1.0], [1.0, 0]])
    assert identity_error(gates, *matched(gates)) == 1, (
        "feature 0 has none, and the others stand where they should"
    )


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


def test_shares_of_rows_add_up_to_all_of_them() -> None:
    torch.manual_seed(0)
    gates, what = torch.rand(40, 3).round(decimals=1), torch.randint(0, 9, (40,))
    live, where = gates > 0.5, torch.arange(40)
    whole = _measured(gates, live, what, where)
    shares = (slice(1, 40, 2), slice(0, 4, 2), slice(4, 40, 2))
    parts = [_measured(gates[rows], live[rows], what[rows], where[rows]) for rows in shares]
    merged = _merged(parts)
    assert torch.allclose(merged.pop("gate"), gates.double().sum(0))
    assert {name: tensor.tolist() for name, tensor in merged.items()} == {
        name: whole[name].tolist() for name in merged
    }
    assert merged["live"].tolist() == live.sum(0).tolist()
    assert merged["histogram"].sum(1).tolist() == [40] * 3
    for c in range(3):
        first = sorted(range(40), key=lambda n: (-float(gates[n, c]), n))[:TOP]
        assert merged["where"][c].tolist() == first, "the most needed, and of equals the first"
        assert merged["what"][c].tolist() == what[first].tolist()


def test_live_components_are_drawn_at_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}

    class Axes:
        def plot(self, x: list, y: list, marker: str) -> None:
            drawn[len(drawn)] = (x, y)

        def set(self, **keys: object) -> None:
            pass

    monkeypatch.setattr(
        pictures, "panels", lambda file, names, draw: [draw(Axes(), name) for name in names]
    )
    pictures.over_time({10: {"a": 5, "b": 1}, 25: {"a": 3, "b": 2}})
    assert drawn == {0: ([10, 25], [5, 3]), 1: ([10, 25], [1, 2])}


def test_a_set_of_single_features_has_other_metrics(tms_target: Path, tmp_path: Path) -> None:
    objective, batch, _ = objective_on(tms_target, tmp_path)
    made = changed(objective, known={"identity": ["linear1"], "dense": [], "components": None})
    assert [type(one).__name__ for one in made.evaluators({"single": 1, "counts": 1})] == [
        "KnownAnswer"
    ]
    assert [type(one).__name__ for one in made.evaluators({"counts": 1})] == ["Anatomy"]
    assert objective.evaluators({"inputs": 1}) == []
    assert not objective.predict({"inputs": batch["inputs"]}).outputs, (
        "of examples that nobody counts there is nothing to say"
    )
    with pytest.raises(ConfigError, match=r"known\.components=null: say how many"):
        changed(objective, known={"identity": [], "dense": ["linear2"], "components": None})


def test_nothing_alive_is_no_likeness(tms_target: Path, tmp_path: Path) -> None:
    objective, _, _ = objective_on(tms_target, tmp_path)
    torch.nn.init.constant_(objective.model.gates.outward_bias_K, -1e9)
    (known,) = objective.evaluators({"single": 1})
    rows = torch.eye(5, dtype=torch.float64) * 0.75
    batch = {"inputs": rows, "counts": torch.ones(5), "single": torch.ones(5)}
    with torch.no_grad():
        known.add(np.arange(5), batch, objective.predict(batch))
    assert known.report(known.rows()).metrics == {
        f"{what}/linear{n}": 0.0 for n in (1, 2) for what in ("mmcs", "ml2r")
    }


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


def test_live_components_on_the_page() -> None:
    one = live_scene({5: {"W": 3}})
    assert [*one] == ["live_components.scene.json"]
    many = live_scene({step: {"W": step, "U": 2} for step in range(200)})
    over_time = json.loads(many["live_components_over_time.scene.json"])
    assert (over_time["x"]["values"][0], over_time["x"]["values"][-1]) == (0, 199)
    assert over_time["lines"][0]["values"] == over_time["x"]["values"]
    rows = [["W", number, 0.5, 0.25, "a b"] for number in range(500)]
    table = json.loads(components_scene("token", rows)["live_components_table.scene.json"])
    assert table["rows"][0] == rows[0]
    assert len(table["rows"]) < len(rows)
    bars = json.loads(many["live_components.scene.json"])["series"][0]
    assert bars["values"] == [199, 2]
