"""Compares a decomposition of a toy model with its known answer: each feature has its own
component, which points in the direction of the net's weights for it.
"""

# N features, C components of a matrix, D numbers that a feature is read from or written to

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from contract import Batch, Prediction, Report
from models.decomposition.components import Components, matches
from utils.command.marks import Keys
from utils.errors import ConfigError
from utils.measure.scene import Files, fitting, levels, scene

TOLERANCE = 0.1  # how far a gate may be from 0 or 1
MOST_ROWS, MOST_COLUMNS = 100, 128  # of a picture of gates


class Known(Keys):
    """The known answer of a toy model, by patterns of matrices."""

    identity: list[str]
    """Each feature has its own component"""
    dense: list[str]
    """Each component serves several features"""
    components: PositiveInt | None
    """Number of components of each dense matrix, without others; needed with dense"""


class KnownAnswer:
    """Checks the gates of examples with a single feature, and compares live components with each
    feature's weights.
    """

    def __init__(self, model: Components, known: Known) -> None:
        self._names = model.names
        self._columns = [model.columns(number) for number in range(len(model.names))]
        self._identity, self._dense = _chosen(model, known.identity), _chosen(model, known.dense)
        self._count = known.components or 0  # without dense matrices, none is compared with it
        self._parts = [by_feature(model, number) for number in range(len(model.names))]
        self._features: list[Tensor] = []
        self._gates: list[Tensor] = []
        self._live: list[Tensor] = []
        self.scalars = [f"identity_error/{name}" for name in self._identity]
        self.scalars += [f"dense_error/{name}" for name in self._dense]
        for name, part in zip(self._names, self._parts, strict=True):
            if part is not None:
                self.scalars += [f"mmcs/{name}", f"ml2r/{name}"]

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        gates, live = (prediction.outputs[name][: len(indices)].cpu() for name in ("gates", "live"))
        self._features.append(torch.from_numpy(indices.copy()))
        self._gates.append(gates.float())
        self._live.append(live)

    def rows(self) -> dict[str, Tensor]:
        if not self._features:
            return {}
        pieces = {"feature": self._features, "gates": self._gates, "live": self._live}
        return {name: torch.cat(of_batches) for name, of_batches in pieces.items()}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        # one example for each feature, in the order of features, whichever rank had it
        order = rows["feature"].argsort()
        gates, live = rows["gates"][order].numpy(), rows["live"][order].numpy()
        metrics: dict[str, float] = {}
        shown: dict[str, np.ndarray] = {}
        orders: dict[str, np.ndarray] = {}  # the component in each column of `shown`
        counts: dict[str, int] = {}
        for name, columns, part in zip(self._names, self._columns, self._parts, strict=True):
            gates_NC, alive_C = gates[:, columns], live[:, columns].any(0)
            counts[name] = int(alive_C.sum())
            # pair features with components, and show them in that order: a right answer is a
            # diagonal
            features, components = matched(gates_NC)
            unmatched = np.setdiff1d(np.arange(gates_NC.shape[1]), components)
            orders[name] = np.concatenate([components, unmatched])
            shown[name] = gates_NC[:, orders[name]]
            # how far the gates are from the known answer
            if name in self._identity:
                error = identity_error(gates_NC, features, components)
                metrics[f"identity_error/{name}"] = error
            if name in self._dense:
                metrics[f"dense_error/{name}"] = dense_error(gates_NC, self._count)
            # and how well live components point along the net's weights
            if part is not None:
                weights_ND, read_NC, written_CD = part
                found = likeness(weights_ND, read_NC[:, alive_C], written_CD[alive_C])
                metrics |= {f"{what}/{name}": value for what, value in found.items()}
        return Report(metrics, files=gates_scene(shown, orders), text=verdict(counts, metrics))


def check_known(model: Components, known: Known) -> None:
    """Raises ConfigError if a pattern of `known` matches no matrix."""
    if known.dense and known.components is None:
        raise ConfigError(
            "arch.loss.known.components=null: say how many components the matrices of"
            " known.dense have; for example 50"
        )
    for key, patterns in (("identity", known.identity), ("dense", known.dense)):
        for pattern in patterns:
            if not matches(f"arch.loss.known.{key}", pattern, model.names):
                raise ConfigError(
                    f"arch.loss.known.{key}={pattern}: matches none of the chosen matrices,"
                    f" {', '.join(model.names[:8])}"
                )


def _chosen(model: Components, patterns: Sequence[str]) -> list[str]:
    matching = {name for pattern in patterns for name in matches("", pattern, model.names)}
    return [name for name in model.names if name in matching]


def gates_scene(gates: Mapping[str, np.ndarray], components: Mapping[str, np.ndarray]) -> Files:
    """Shows the gates [N, C] of each matrix. `components` has the number of the component in each
    column.
    """
    panels = []
    # one panel for each matrix, cut to what a reader can see
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
    # as many panels as fit the page's limit
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


def verdict(live: Mapping[str, int], metrics: Mapping[str, float]) -> str:
    """Returns a line with the live components and errors of each matrix, and whether they are the
    known answer.
    """
    parts, errors = [], []
    for name, count in live.items():
        part = f"{name} {count} live component{'s' * (count != 1)}"
        for what in ("identity_error", "dense_error"):
            if (error := metrics.get(f"{what}/{name}")) is not None:
                part += f", {what.replace('_', ' ')} {error:.0f}"
                errors.append(error)
        parts.append(part)
    found = "none is given"
    if errors:
        found = "NOT found" if any(errors) else "found"
    return f"known answer: {found} ({'; '.join(parts)})"


def matched(gates_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features and components of the one-to-one pairs with the largest sum of gates, in
    the order of features.
    """
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(-gates_NC)


def identity_error(gates_NC: np.ndarray, features: np.ndarray, components: np.ndarray) -> float:
    """Counts gates that are further than `TOLERANCE` from 1 in these pairs and from 0 elsewhere,
    and features without a component.
    """
    wanted_NC = np.zeros_like(gates_NC)
    wanted_NC[features, components] = 1
    return float((np.abs(gates_NC - wanted_NC) > TOLERANCE).sum() + len(gates_NC) - len(features))


def dense_error(gates_NC: np.ndarray, count: int) -> float:
    """Counts open gates of components beyond the first `count` by need, and components among these
    that fewer than two features need.
    """
    # components in the order in which features need them; the first `count` should be enough
    order = np.argsort(-gates_NC.sum(0), kind="stable")
    dense, rest = gates_NC[:, order[:count]], gates_NC[:, order[count:]]
    too_few = (dense > TOLERANCE).sum(0) < 2
    missing = max(0, count - gates_NC.shape[1])
    return float((rest > TOLERANCE).sum() + too_few.sum() + missing)


def likeness(
    weights_ND: np.ndarray, read_NC: np.ndarray, written_CD: np.ndarray
) -> dict[str, float]:
    """Returns the cosine between each feature's weights and the component most like them (mmcs) and
    the ratio of their lengths (ml2r), as means over features: 0 without components.
    """
    if not len(written_CD):
        return {"mmcs": 0.0, "ml2r": 0.0}
    # directions and lengths apart; the clip keeps a zero vector from dividing by zero
    weight_N = np.linalg.norm(weights_ND, axis=1).clip(1e-12)
    length_C = np.linalg.norm(written_CD, axis=1).clip(1e-12)
    directions_ND, directions_CD = weights_ND / weight_N[:, None], written_CD / length_C[:, None]
    # a component may point the other way if it also reads with the opposite sign
    cosines_NC = (directions_ND @ directions_CD.T) * np.sign(read_NC)
    best = np.arange(len(weights_ND)), cosines_NC.argmax(1)
    ratios_N = np.abs(read_NC[best]) * length_C[best[1]] / weight_N
    return {"mmcs": float(cosines_NC[best].mean()), "ml2r": float(ratios_N.mean())}


def by_feature(model: Components, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns a matrix with a row for each feature, how much each component reads of each feature,
    and what it writes; the other way round if outputs are features, None if neither side is.
    """
    net: Any = model.target.net
    matrix = model.seams[model.names[number]].matrix
    # copies: weights may be released or updated before these are used
    V, U, matrix = (
        tensor.detach().to("cpu", torch.float64, copy=True)
        for tensor in (*model.factors(number), matrix)
    )
    embedding = getattr(net, "embedding_ND", None)
    if embedding is not None:  # features are directions of the stream
        embedding = embedding.detach().double().cpu()
        if len(V) == embedding.shape[1]:
            V, matrix = embedding @ V, embedding @ matrix
        elif U.shape[1] == embedding.shape[1]:
            U, matrix = U @ embedding.t(), matrix @ embedding.t()
    # features are the inputs of the first matrices, and the outputs of the last
    if len(V) == net.features:
        return matrix.numpy(), V.numpy(), U.numpy()
    if U.shape[1] == net.features:
        return matrix.t().numpy(), U.t().numpy(), V.t().numpy()
    return None
