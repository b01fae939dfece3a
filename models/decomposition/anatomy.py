"""Measures in evaluations how often each component is needed, and by which inputs."""

# B batch, L positions, N rows, C components of a matrix, K of all matrices, T of the inputs that
# need a component most, X places of a context

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition import page
from models.decomposition.components import Components
from models.decomposition.export import MATRICES, TABLE
from models.decomposition.gates_scene import components_scene, live_scene
from models.decomposition.portrait import between_matrices, portraits
from utils.files import read_row
from utils.measure.evaluator import Batch, Prediction, Report

PAGE = "components.html"
TOP, BINS = 8, 20
SHOWN = 8  # components of a matrix in the report page's table
BEFORE, AFTER = 10, 4  # tokens of a context besides the one that needs the component
MOST_CONTEXTS = 100_000  # components; contexts of more would take too much memory
TEXTS, IN_TABLES = 4, 20  # attributions: texts, and components of a matrix
MOST_MASKS = 1 << 26  # of components at all positions of these texts
IN_TABLE = 3  # contexts of a component
LIVE_SHARE = 1e-3  # the share of rows that must need a component for it to count as live
MOST = 1000  # earlier evaluations that are read
GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number


class Anatomy:
    """Counts over a set of examples, and the inputs that open each gate most."""

    def __init__(self, model: Components) -> None:
        numbers = range(len(model.names))
        self._names, self._columns = model.names, [model.columns(number) for number in numbers]
        self._ties = {
            model.names[later]: (model.names[first], turned)
            for later, (first, turned) in model.ties.items()
        }
        self._decode, self._kind = model.decode, "token" if model.predicts_tokens else "feature"
        has_contexts = model.predicts_tokens and model.total <= MOST_CONTEXTS
        self._before, self._after = (BEFORE, AFTER) if has_contexts else (0, 0)
        self._norms_K = torch.cat([_norms(*model.factors(number)) for number in numbers])
        self._portraits = {} if model.predicts_tokens else portraits(model)
        self._step, self._earlier = 0, dict[int, dict[str, int]]()
        self._totals: dict[str, Tensor] = {}
        self.scalars = [f"live/{name}" for name in self._names]

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        gates, live, counted = (
            prediction.outputs[name][: len(indices)] for name in ("gates", "live", "counted")
        )
        inputs = batch["inputs"][: len(indices)]
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

    def attribute(
        self,
        model: Components,
        x: Tensor,
        documents: Tensor | None,
        gates: Tensor,
        live: Tensor,
    ) -> None:
        """Measures attributions of a language model: between the components that the first texts
        need most.

        `gates` and `live` are 0 at positions that do not count.
        """
        if self._kind != "token":
            return
        texts = min(len(x), TEXTS, MOST_MASKS // (x[0].numel() * model.total))
        if not texts:
            return
        whose = "first text needs" if texts == 1 else f"first {texts} texts need"
        self._portraits = between_matrices(
            model,
            x[:texts],
            gates[:texts],
            live[:texts].flatten(0, -2).sum(0),
            f"the components that the {whose} most",
            IN_TABLES,
            None if documents is None else documents[:texts],
        )

    @property
    def _around(self) -> tuple[int, int]:
        """How many positions before and after a token belong to its context."""
        return self._before, self._after

    def rows(self) -> dict[str, Tensor]:
        """Returns a row for each component: what this rank has seen of it."""
        return self._totals

    def recall(self, step: int, earlier: Callable[[str, int], Sequence[Path]]) -> None:
        """Reads how many components were live in earlier evaluations."""
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
        over_time = dict(sorted({**self._earlier, self._step: alive}.items()))
        files |= live_scene(over_time)
        files |= components_scene(self._kind, self._most_needed(totals, share_K))
        return Report(
            {f"live/{name}": float(number) for name, number in alive.items()},
            files=files,
            pages={PAGE: self._page(totals, share_K)},
        )

    def _table(self, totals: Mapping[str, Tensor], share_K: Tensor) -> str:
        """Returns a line for each component: how often it is needed, and by which inputs most. A
        dead one has no inputs.
        """
        token = self._kind == "token"
        head = ["matrix", "component", "live", "mean gate", f"top {self._kind}s"]
        lines = ["\t".join([*head, *(["contexts"] if token else [])])]
        mean_K = totals["gate"] / totals["rows"]
        for name, columns in zip(self._names, self._columns, strict=True):
            for k in range(columns.start, columns.stop):
                share, mean = f"{share_K[k]:.6f}", f"{mean_K[k]:.6f}"
                top = ", ".join(f"{what} {value:.2f}" for what, value in self._top(totals, k))
                line = [name, str(k - columns.start), share, mean, top]
                lines.append("\t".join([*line, *([self._contexts(totals, k)] if token else [])]))
        return "\n".join(lines) + "\n"

    def _top(self, totals: Mapping[str, Tensor], k: int) -> list[tuple[str, float]]:
        """Returns the inputs that need a component most, with their highest gates; none if dead."""
        if not totals["live"][k]:
            return []
        top: dict[str, float] = {}
        for what, value in zip(
            totals["what"][k].tolist(), totals["value"][k].tolist(), strict=True
        ):
            if value > 0:
                top.setdefault(self._shown(what), value)
        return list(top.items())

    def _contexts(self, totals: Mapping[str, Tensor], k: int) -> str:
        """Returns the contexts that need a component most, as JSON, with the token in [[ ]]."""
        if not totals["live"][k]:
            return ""
        written, at = [], self._before
        for tokens, value in zip(totals["around"][k].tolist(), totals["value"][k], strict=True):
            if value > 0:
                parts = tokens[:at], tokens[at : at + 1], tokens[at + 1 :]
                texts = [self._text([token for token in part if token >= 0]) for part in parts]
                context = "{}[[{}]]{}".format(*texts)
                written.append(json.dumps(context, ensure_ascii=False))
        return ", ".join(written[:IN_TABLE])

    def _most_needed(self, totals: Mapping[str, Tensor], share_K: Tensor) -> list[list[Any]]:
        """Returns the most needed components of each matrix, as rows for the report page."""
        rows: list[list[Any]] = []
        for name, columns in zip(self._names, self._columns, strict=True):
            order = share_K[columns].argsort(descending=True, stable=True)[:SHOWN]
            for c in order.tolist():
                k = columns.start + c
                top = " ".join(what for what, _ in self._top(totals, k))
                mean = float(totals["gate"][k] / totals["rows"][k])
                rows.append([name, c, float(share_K[k]), mean, top])
        return [row for row in rows if row[2] >= LIVE_SHARE]

    def _page(self, totals: Mapping[str, Tensor], share_K: Tensor) -> str:
        """Returns components.html."""
        matrices = []
        for name, columns in zip(self._names, self._columns, strict=True):
            order = share_K[columns].argsort(descending=True, stable=True)
            order = order[share_K[columns][order] > 0]
            dead = columns.stop - columns.start - len(order)
            matrices.append(
                {
                    "name": name,
                    "summary": f"{dead + len(order)} components; "
                    + (f"no input needs {dead} of them." if dead else "some input needs each."),
                    "components": [
                        self._component(totals, columns.start + c, c, float(share_K[columns][c]))
                        for c in order.tolist()
                    ],
                    **self._portraits.get(name, {}),
                }
            )
        # numbers of tokens need a space between them
        apart = " " if self._decode is None and self._kind == "token" else ""
        texts = {token: self._text([token]) + apart for token in _used(totals["around"])}
        return page.draw(f"Components after step {self._step}", self._kind, matrices, texts)

    def _component(
        self, totals: Mapping[str, Tensor], k: int, number: int, share: float
    ) -> dict[str, Any]:
        """Returns what the page shows of a component."""
        contexts = []
        of_component = (totals[name][k].tolist() for name in ("value", "around", "gates_around"))
        for value, tokens, gates in zip(*of_component, strict=True):
            there = [place for place, token in enumerate(tokens) if token >= 0]
            if value > 0:
                contexts.append(
                    {
                        "gate": round(value, 4),
                        "at": there.index(self._before),
                        "tokens": [tokens[place] for place in there],
                        "gates": [gates[place] for place in there],
                    }
                )
        if self._kind == "feature":  # keeps the highest gate of each feature
            contexts = list({each["tokens"][0]: each for each in reversed(contexts)}.values())[::-1]
        return {
            "number": number,
            "live": round(share, 6),
            "mean": round(float(totals["gate"][k] / totals["rows"][k]), 6),
            "norm": round(float(self._norms_K[k]), 5),
            "histogram": totals["histogram"][k].tolist(),
            "contexts": contexts,
        }

    def _text(self, tokens: list[int]) -> str:
        """Returns tokens as text, or the number of a feature."""
        if self._decode is None or not tokens:
            return " ".join(map(str, tokens))
        return self._decode(tokens)

    def _shown(self, what: int) -> str:
        return (
            json.dumps(self._decode([what]), ensure_ascii=False)
            if self._decode is not None
            else str(what)
        )


def _norms(V: Tensor, U: Tensor) -> Tensor:
    """Returns the norm of each component, the outer product of its factors."""
    return (V.detach().norm(dim=0) * U.detach().norm(dim=1)).cpu()


def _used(around: Tensor) -> list[int]:
    """Returns the tokens that occur in contexts."""
    return [token for token in around.unique().tolist() if token >= 0]


def _measured(
    gates_BLC: Tensor,
    live_BLC: Tensor,
    what_BL: Tensor,
    where_B: Tensor,
    places_N2: Tensor,
    around: tuple[int, int],
) -> dict[str, Tensor]:
    """Returns statistics of each component of a matrix over these places (example, position)."""
    drawn_N = _drawn(where_B[places_N2[:, 0]], places_N2[:, 1])
    mixed_N = drawn_N.argsort()
    drawn_N, (example_N, position_N) = drawn_N[mixed_N], places_N2[mixed_N].unbind(1)
    gates_NC, live_NC = gates_BLC[example_N, position_N], live_BLC[example_N, position_N]
    bins_NC = (gates_NC.float() * BINS).long().clamp_(max=BINS - 1) + BINS * torch.arange(
        gates_NC.shape[1], device=gates_NC.device
    )
    # among equal gates the first that is drawn, as in `_merged`
    ordered_NC = gates_NC.float().sort(dim=0, descending=True, stable=True)
    values_CT, rows_CT = ordered_NC.values[:TOP].t(), ordered_NC.indices[:TOP].t()
    missing = TOP - values_CT.shape[1]
    tokens_CTX, gates_CTX = _contexts_of(
        gates_BLC, what_BL, example_N[rows_CT], position_N[rows_CT], around
    )
    totals = {
        "live": live_NC.sum(0),
        "gate": gates_NC.double().sum(0),
        "rows": torch.full_like(live_NC[0], len(gates_NC), dtype=torch.long),
        "histogram": (
            torch.bincount(bins_NC.flatten(), minlength=BINS * gates_NC.shape[1]).view(-1, BINS)
        ),
        "value": F.pad(values_CT, (0, missing), value=-1),
        "what": F.pad(what_BL[example_N, position_N][rows_CT].long(), (0, missing)),
        "drawn": F.pad(drawn_N[rows_CT], (0, missing)),
        "around": F.pad(tokens_CTX.int(), (0, 0, 0, missing), value=-1),
        "gates_around": F.pad(gates_CTX, (0, 0, 0, missing)),
    }
    return {name: tensor.cpu() for name, tensor in totals.items()}


def _drawn(where_N: Tensor, position_N: Tensor) -> Tensor:
    """Returns a number for each place, which orders places as if by chance, and at any number of
    ranks alike: the first texts would otherwise fill the contexts of all gates that reach 1.
    """
    return (where_N.long() * (1 << 32) + position_N) * GOLDEN


def _contexts_of(
    gates_BLC: Tensor,
    what_BL: Tensor,
    example_CT: Tensor,
    position_CT: Tensor,
    around: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Returns the tokens around each place, -1 beyond a text's ends, and the component's gates
    there in hundredths.
    """
    offsets_X = torch.arange(-around[0], around[1] + 1, device=what_BL.device)
    places_CTX = position_CT.unsqueeze(-1) + offsets_X
    inside_CTX = (places_CTX >= 0) & (places_CTX < what_BL.shape[1])
    places_CTX, example_CT1 = places_CTX.clamp(0, what_BL.shape[1] - 1), example_CT.unsqueeze(-1)
    tokens_CTX = what_BL[example_CT1, places_CTX].masked_fill(~inside_CTX, -1)
    component_C11 = torch.arange(gates_BLC.shape[-1], device=what_BL.device)[:, None, None]
    gates_CTX = gates_BLC[example_CT1, places_CTX, component_C11].float()
    return tokens_CTX, (100 * gates_CTX).round().to(torch.uint8).masked_fill(~inside_CTX, 0)


def _merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merges the statistics of several ranks. The order of the top examples does not depend on how
    rows were distributed over ranks.
    """
    sums = {
        name: torch.stack([part[name] for part in parts]).sum(0)
        for name in ("live", "gate", "rows", "histogram")
    }
    value, drawn = (torch.cat([part[name] for part in parts], 1) for name in ("value", "drawn"))
    first = drawn.argsort(dim=1, stable=True)
    order = first.gather(1, value.gather(1, first).argsort(dim=1, descending=True, stable=True))[
        :, :TOP
    ]
    rows = torch.arange(len(order)).unsqueeze(1)
    top = {
        name: torch.cat([part[name] for part in parts], 1)[rows, order]
        for name in ("value", "what", "drawn", "around", "gates_around")
    }
    return sums | top
