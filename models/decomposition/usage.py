"""Measures in evaluations how often each component is needed, and by which inputs."""

# B batch, L positions, N rows, C components of a matrix, K of all matrices, T of the inputs that
# need a component most, X places of a context

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contract import Batch, Prediction, Report
from models.decomposition.components import Components
from utils.measure.scene import Files, fitting, scene
from utils.transfer import wide

TABLE = "components.tsv"
TOP = 8  # inputs of a component
BEFORE, AFTER = 10, 4  # tokens of a context besides the one that needs the component
MOST_CONTEXTS = 100_000  # components; contexts of more would take too much memory
LIVE_SHARE = 1e-3  # the share of rows that must need a component for it to count as live
SHOWN, MOST_SHOWN = 8, 120  # components of a matrix, and of all, on the report page
GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number


class Usage:
    """Counts how often gates are open over a set of examples, and keeps the inputs that open each
    of them most.
    """

    def __init__(self, model: Components) -> None:
        self._names = model.names
        self._columns = [model.columns(number) for number in range(len(model.names))]
        self._decode, self._kind = model.decode, "token" if model.predicts_tokens else "feature"
        has_contexts = model.predicts_tokens and model.total <= MOST_CONTEXTS
        self._around = (BEFORE, AFTER) if has_contexts else (0, 0)
        self._totals: dict[str, Tensor] = {}
        self.scalars = [f"live/{name}" for name in self._names]

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        gates, live, counted = (
            prediction.outputs[name][: len(indices)] for name in ("gates", "live", "counted")
        )
        inputs = batch["inputs"][: len(indices)]
        # a feature's example may have several gates; the largest counts
        what_BL = inputs if self._kind == "token" else inputs.abs().argmax(-1)
        if what_BL.ndim == 1:  # toy models have no positions
            what_BL, counted = what_BL.unsqueeze(1), counted.unsqueeze(1)
            gates, live = gates.unsqueeze(1), live.unsqueeze(1)
        where = torch.from_numpy(indices).to(gates.device)
        places = counted.nonzero()
        if not len(places):
            return
        # matrix by matrix: in large nets, the gates of all components at once would take more
        # memory than the net
        pieces = [
            _measured(gates[..., columns], live[..., columns], what_BL, where, places, self._around)
            for columns in self._columns
        ]
        new = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        self._totals = _merged([self._totals, new]) if self._totals else new

    def rows(self) -> dict[str, Tensor]:
        """Returns a row for each component: what this rank has seen of it."""
        return self._totals

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        # the ranks' rows follow one another: cut them apart, and merge them
        count = self._columns[-1].stop  # rows that each rank has sent
        starts = range(0, len(rows["live"]), count)
        totals = _merged(
            [{name: of[start : start + count] for name, of in rows.items()} for start in starts]
        )
        share_K = totals["live"] / totals["rows"]
        alive = {
            name: float((share_K[columns] >= LIVE_SHARE).sum())
            for name, columns in zip(self.scalars, self._columns, strict=True)
        }
        files = self._scene(totals, share_K)
        files[TABLE] = self._table(totals, share_K)
        return Report(alive, files)

    def _table(self, totals: Mapping[str, Tensor], share_K: Tensor) -> str:
        """Returns a line for each component: how often it is needed, and by which inputs most. A
        dead one has no inputs.
        """
        inputs = [f"top {self._kind}s", *(["contexts"] if self._kind == "token" else [])]
        lines = ["\t".join(["matrix", "component", "live", "mean gate", *inputs])]
        mean_K = totals["gate"] / totals["rows"]
        for name, columns in zip(self._names, self._columns, strict=True):
            for k in range(columns.start, columns.stop):
                line = [name, str(k - columns.start), f"{share_K[k]:.6f}", f"{mean_K[k]:.6f}"]
                line.append(", ".join(f"{what} {gate:.2f}" for what, gate in self._top(totals, k)))
                if self._kind == "token":
                    quoted = [
                        json.dumps(text, ensure_ascii=False) for text in self._contexts(totals, k)
                    ]
                    line.append(", ".join(quoted))
                lines.append("\t".join(line))
        return "\n".join(lines) + "\n"

    def _top(self, totals: Mapping[str, Tensor], k: int) -> list[tuple[str, float]]:
        """Returns the inputs that need a component most, with their highest gates; none if dead."""
        if not totals["live"][k]:
            return []
        top: dict[str, float] = {}
        pairs = zip(totals["what"][k].tolist(), totals["value"][k].tolist(), strict=True)
        for what, value in pairs:
            if value > 0:
                top.setdefault(self._shown(what), value)  # the highest come first
        return list(top.items())

    def _contexts(self, totals: Mapping[str, Tensor], k: int) -> list[str]:
        """Returns the contexts that need a component most, with the token in [[ ]]."""
        if not totals["live"][k]:
            return []
        contexts, at = [], self._around[0]
        for tokens, value in zip(totals["around"][k].tolist(), totals["value"][k], strict=True):
            if value > 0:
                parts = tokens[:at], tokens[at : at + 1], tokens[at + 1 :]
                texts = [self._text([token for token in part if token >= 0]) for part in parts]
                contexts.append("{}[[{}]]{}".format(*texts))
        return contexts

    def _scene(self, totals: Mapping[str, Tensor], share_K: Tensor) -> Files:
        """Lists the most needed components of each matrix on the report page."""
        rows: list[list[Any]] = []
        for name, matrix in zip(self._names, self._columns, strict=True):
            # the most needed ones of each matrix, without the dead
            order = share_K[matrix].argsort(descending=True, stable=True)[:SHOWN]
            for c in order.tolist():
                k = matrix.start + c
                if share_K[k] < LIVE_SHARE:
                    continue
                top = " ".join(what for what, _ in self._top(totals, k))
                mean = float(totals["gate"][k] / totals["rows"][k])
                context = self._contexts(totals, k)[:1] if self._kind == "token" else []
                rows.append([name, c, float(share_K[k]), mean, top, *context])
        # the page has room for some rows; those of the first matrices are kept
        columns = ["matrix", "component", "needed by", "mean gate", f"top {self._kind}s"]
        columns += ["first context"] if self._kind == "token" else []
        return fitting(
            rows[:MOST_SHOWN],
            lambda some: scene(
                "live_components_table",
                "table",
                "The most needed components",
                columns=columns,
                percent=[2],
                rows=some,
            ),
        )

    def _text(self, tokens: list[int]) -> str:
        """Returns tokens as text, or their numbers."""
        if self._decode is None or not tokens:
            return " ".join(map(str, tokens))
        return self._decode(tokens)

    def _shown(self, what: int) -> str:
        text = self._text([what])
        return text if self._decode is None else json.dumps(text, ensure_ascii=False)


def _measured(
    gates_BLC: Tensor,
    live_BLC: Tensor,
    what_BL: Tensor,
    where_B: Tensor,
    places_N2: Tensor,
    around: tuple[int, int],
) -> dict[str, Tensor]:
    """Returns statistics of each component of a matrix over these places (example, position)."""
    # places in an order that any number of ranks agrees on
    drawn_N = _drawn(where_B[places_N2[:, 0]], places_N2[:, 1])
    mixed_N = drawn_N.argsort()
    drawn_N, (example_N, position_N) = drawn_N[mixed_N], places_N2[mixed_N].unbind(1)
    gates_NC, live_NC = gates_BLC[example_N, position_N], live_BLC[example_N, position_N]
    # among equal gates the first that is drawn, as in `_merged`
    ordered_NC = gates_NC.float().sort(dim=0, descending=True, stable=True)
    values_CT, rows_CT = ordered_NC.values[:TOP].t(), ordered_NC.indices[:TOP].t()
    # padding for fewer places than TOP, so that the rows of all batches and ranks can be merged
    missing = TOP - values_CT.shape[1]
    # the tokens around the places that need each component most
    tokens_CTX = _contexts_of(what_BL, example_N[rows_CT], position_N[rows_CT], around)
    totals = {
        "live": live_NC.sum(0),
        "gate": wide(gates_NC).sum(0),
        "rows": torch.full_like(live_NC[0], len(gates_NC), dtype=torch.long),
        "value": F.pad(values_CT, (0, missing), value=-1),
        "what": F.pad(what_BL[example_N, position_N][rows_CT].long(), (0, missing)),
        "drawn": F.pad(drawn_N[rows_CT], (0, missing)),
        "around": F.pad(tokens_CTX.int(), (0, 0, 0, missing), value=-1),
    }
    return {name: tensor.cpu() for name, tensor in totals.items()}


def _drawn(where_N: Tensor, position_N: Tensor) -> Tensor:
    """Returns a pseudorandom number for each place, the same at any number of ranks. In order of
    places, the first texts would fill the contexts of all gates that reach 1.
    """
    return (where_N.long() * (1 << 32) + position_N) * GOLDEN


def _contexts_of(
    what_BL: Tensor, example_CT: Tensor, position_CT: Tensor, around: tuple[int, int]
) -> Tensor:
    """Returns the tokens around each place, -1 beyond a text's ends."""
    # clamp before indexing, then mask places beyond the ends
    offsets_X = torch.arange(-around[0], around[1] + 1, device=what_BL.device)
    places_CTX = position_CT.unsqueeze(-1) + offsets_X
    inside_CTX = (places_CTX >= 0) & (places_CTX < what_BL.shape[1])
    places_CTX = places_CTX.clamp(0, what_BL.shape[1] - 1)
    return what_BL[example_CT.unsqueeze(-1), places_CTX].masked_fill(~inside_CTX, -1)


def _merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merges the statistics of several ranks. The order of the top examples does not depend on how
    rows were distributed over ranks.
    """
    sums = {
        name: torch.stack([part[name] for part in parts]).sum(0)
        for name in ("live", "gate", "rows")
    }
    examples = {
        name: torch.cat([part[name] for part in parts], 1)
        for name in ("value", "what", "drawn", "around")
    }
    # by value, and among equal ones by what is drawn first: two stable sorts, the lesser key first
    by_draw = examples["drawn"].argsort(dim=1, stable=True)
    value = examples["value"].gather(1, by_draw)
    order = by_draw.gather(1, value.argsort(dim=1, descending=True, stable=True))[:, :TOP]
    rows = torch.arange(len(order)).unsqueeze(1)
    return sums | {name: tensor[rows, order] for name, tensor in examples.items()}
