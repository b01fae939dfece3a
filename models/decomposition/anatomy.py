"""Measures in evaluations how often each component is needed, and by which inputs."""

# N rows, C components of a matrix, K of all matrices, T of the inputs that need a component most

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition import pictures
from models.decomposition.component_files import MATRICES, TABLE
from models.decomposition.components import Components
from models.decomposition.gates_scene import components_scene, live_scene
from utils.files import read_row
from utils.measure.report import Batch, Prediction, Report

TOP, BINS = 8, 20
SHOWN = 8  # components of a matrix in the report page's table
LIVE_SHARE = 1e-3  # of rows, in which a component must be needed to be one of the living
MOST = 1000  # evaluations before


class Anatomy:
    """Counts over a set of examples."""

    def __init__(self, model: Components) -> None:
        self._names, self._columns = (
            model.names,
            [model.columns(number) for number in range(len(model.names))],
        )
        self._ties = {
            model.names[later]: (model.names[first], turned)
            for later, (first, turned) in model.ties.items()
        }
        self._decode, self._kind = model.decode, "token" if model.predicts_tokens else "feature"
        self._step, self._earlier = 0, dict[int, dict[str, int]]()
        self._totals: dict[str, Tensor] = {}
        self.scalars = [f"live/{name}" for name in self._names]

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        gates, live, counted = (
            prediction.outputs[name][: len(indices)] for name in ("gates", "live", "counted")
        )
        what = batch["inputs"][: len(indices)]
        what = (what if self._kind == "token" else what.abs().argmax(-1))[counted]
        where = torch.from_numpy(indices).to(gates.device)
        where = where.view(-1, *[1] * (counted.ndim - 1)).expand_as(counted)[counted]
        # matrix by matrix: of large nets, numbers of all components at once would take more memory
        # than the net
        if len(what):
            pieces = [
                _measured(gates[..., columns][counted], live[..., columns][counted], what, where)
                for columns in self._columns
            ]
            new = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
            self._totals = _merged([self._totals, new]) if self._totals else new

    def rows(self) -> dict[str, Tensor]:
        """One for each component: what this rank has seen of it."""
        return self._totals

    def recall(self, step: int, earlier: Callable[[str, int], Sequence[Path]]) -> None:
        """How many were alive then."""
        self._step = step
        for file in earlier(MATRICES, MOST):
            row, then = read_row(file), file.parents[1].name.removeprefix("step_")
            live = {
                name: row[name].get("live")
                for name in self._names
                if isinstance(row.get(name), dict)
            }
            if (
                then.isdecimal()
                and len(live) == len(self._names)
                and all(isinstance(count, int) for count in live.values())
            ):
                self._earlier[int(then)] = live

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        count = self._columns[-1].stop
        parts = [
            {name: tensor[start : start + count] for name, tensor in rows.items()}
            for start in range(0, len(rows["live"]), count)
        ]
        totals = _merged(parts)
        share_K = totals["live"] / totals["rows"]
        alive = {
            name: int((share_K[columns] >= LIVE_SHARE).sum())
            for name, columns in zip(self._names, self._columns, strict=True)
        }
        matrices: dict[str, dict[str, Any]] = {name: {"live": alive[name]} for name in self._names}
        for name, (first, turned) in self._ties.items():
            matrices[name] |= {"tied_to": first, "transposed": turned}
        files: dict[str, str | bytes] = {
            TABLE: self._table(totals, share_K),
            MATRICES: json.dumps(matrices, indent=1) + "\n",
        }
        by_matrix = {
            name: totals["histogram"][columns].sum(0).numpy()
            for name, columns in zip(self._names, self._columns, strict=True)
        }
        shares = {
            name: share_K[columns].numpy()
            for name, columns in zip(self._names, self._columns, strict=True)
        }
        files |= pictures.histograms(by_matrix, shares)
        over_time = dict(sorted({**self._earlier, self._step: alive}.items()))
        files |= pictures.over_time(over_time) | live_scene(over_time)
        files |= components_scene(self._kind, self._most_needed(totals, share_K))
        return Report(
            {f"live/{name}": float(number) for name, number in alive.items()}, files=files
        )

    def _table(self, totals: Mapping[str, Tensor], share_K: Tensor) -> str:
        """A line for each component: how often it is needed, and by what most."""
        lines = [f"matrix\tcomponent\tlive\tmean gate\ttop {self._kind}s"]
        mean_K = totals["gate"] / totals["rows"]
        for name, columns in zip(self._names, self._columns, strict=True):
            for k in range(columns.start, columns.stop):
                needed = zip(totals["what"][k].tolist(), totals["value"][k].tolist(), strict=True)
                top = dict.fromkeys(self._shown(what) for what, value in needed if value > 0)
                share, mean = f"{share_K[k]:.6f}", f"{mean_K[k]:.6f}"
                lines.append("\t".join([name, str(k - columns.start), share, mean, " ".join(top)]))
        return "\n".join(lines) + "\n"

    def _most_needed(self, totals: Mapping[str, Tensor], share_K: Tensor) -> list[list[Any]]:
        """The most needed components of each matrix, as rows of the report page's table."""
        rows: list[list[Any]] = []
        for name, columns in zip(self._names, self._columns, strict=True):
            order = share_K[columns].argsort(descending=True, stable=True)[:SHOWN]
            for c in order.tolist():
                k = columns.start + c
                needed = zip(totals["what"][k].tolist(), totals["value"][k].tolist(), strict=True)
                top = dict.fromkeys(self._shown(what) for what, value in needed if value > 0)
                mean = float(totals["gate"][k] / totals["rows"][k])
                rows.append([name, c, float(share_K[k]), mean, " ".join(top)])
        return [row for row in rows if row[2] >= LIVE_SHARE]

    def _shown(self, what: int) -> str:
        return (
            json.dumps(self._decode([what]), ensure_ascii=False)
            if self._decode is not None
            else str(what)
        )


def _measured(
    gates_NC: Tensor, live_NC: Tensor, what_N: Tensor, where_N: Tensor
) -> dict[str, Tensor]:
    """Statistics of each component of a matrix over these rows."""
    bins_NC = (gates_NC.float() * BINS).long().clamp_(max=BINS - 1) + BINS * torch.arange(
        gates_NC.shape[1], device=gates_NC.device
    )
    # of equals the first, as in `_merged`
    ordered_NC = gates_NC.float().sort(dim=0, descending=True, stable=True)
    values_TC, rows_TC = ordered_NC.values[:TOP], ordered_NC.indices[:TOP]
    lacking = TOP - len(values_TC)
    totals = {
        "live": live_NC.sum(0),
        "gate": gates_NC.double().sum(0),
        "rows": torch.full_like(live_NC[0], len(gates_NC), dtype=torch.long),
        "histogram": (
            torch.bincount(bins_NC.flatten(), minlength=BINS * gates_NC.shape[1]).view(-1, BINS)
        ),
        "value": F.pad(values_TC.t(), (0, lacking), value=-1),
        "what": F.pad(what_N[rows_TC].t().long(), (0, lacking)),
        "where": F.pad(where_N[rows_TC].t(), (0, lacking)),
    }
    return {name: tensor.cpu() for name, tensor in totals.items()}


def _merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The statistics of several ranks' rows as one: the top examples of all, in an order that does
    not depend on how rows were dealt to ranks.
    """
    sums = {
        name: torch.stack([part[name] for part in parts]).sum(0)
        for name in ("live", "gate", "rows", "histogram")
    }
    value, what, where = (
        torch.cat([part[name] for part in parts], 1) for name in ("value", "what", "where")
    )
    first = where.argsort(dim=1, stable=True)
    order = first.gather(1, value.gather(1, first).argsort(dim=1, descending=True, stable=True))[
        :, :TOP
    ]
    return sums | {
        "value": value.gather(1, order),
        "what": what.gather(1, order),
        "where": where.gather(1, order),
    }
