"""Shows gate matrices and live components on the report page."""

# N features, C components of a matrix

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.measure.scene import Files, fitting, levels, scene, spread

MOST_ROWS, MOST_COLUMNS = 100, 128
MOST_STEPS, MOST_MATRICES, MOST_TABLE = 60, 24, 120


def gates_scene(gates: Mapping[str, np.ndarray], components: Mapping[str, np.ndarray]) -> Files:
    """Shows the gates [N, C] of each matrix. `components` has the number of the component in each
    column.
    """
    panels = []
    for name, gates_NC in gates.items():
        rows = min(len(gates_NC), MOST_ROWS)
        # later columns are closed, or the matrix is not an identity
        columns = min(2 * len(gates_NC), gates_NC.shape[1], MOST_COLUMNS)
        panels.append(
            {
                "name": name,
                "rows": list(range(rows)),
                "columns": components[name][:columns].tolist(),
                "levels": [levels(row[:columns].tolist()) for row in gates_NC[:rows]],
            }
        )
    return fitting(
        panels,
        lambda some: scene(
            "gates",
            "matrix",
            "Gates by input feature and component",
            "How far each component's gate opens for one feature alone; components are in the"
            " order of the features they suit best.",
            row_label="input feature",
            column_label="component",
            panels=some,
        ),
    )


def live_scene(counts: Mapping[int, Mapping[str, int]]) -> Files:
    """Shows how many components of each matrix were live after each of these steps."""
    known = sorted(counts)
    steps = [known[place - 1] for place in spread(len(known), MOST_STEPS)]
    names = list(counts[steps[-1]])[:MOST_MATRICES]
    now = scene(
        "live_components",
        "bars",
        "Live components by matrix",
        "Components that at least one input in a thousand needs.",
        x={"values": names},
        y={"label": "live components"},
        horizontal=True,
        series=[
            {"name": "live", "values": [counts[steps[-1]][name] for name in names], "colour": "c1"}
        ],
    )
    if len(steps) < 2:
        return now
    return now | scene(
        "live_components_over_time",
        "lines",
        "Live components by training step",
        x={"label": "step", "values": steps},
        y={"label": "live components", "min": 0},
        lines=[
            {
                "name": name,
                "values": [counts[step].get(name) for step in steps],
                "colour": f"c{number % 8 + 1}",
            }
            for number, name in enumerate(names)
        ],
    )


def components_scene(kind: str, rows: Sequence[Sequence[Any]]) -> Files:
    """Lists components with how often they are needed, and the tokens or features that need them
    most.
    """
    return fitting(
        rows[:MOST_TABLE],
        lambda some: scene(
            "live_components_table",
            "table",
            "The most needed components",
            columns=["matrix", "component", "needed by", "mean gate", f"top {kind}s"],
            percent=[2],
            rows=some,
        ),
    )
