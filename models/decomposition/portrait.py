"""What components.html shows above the components of a matrix: gates by feature and directions of
toy models, and attributions between components.
"""

# N features, C components of a matrix, K components of all matrices, D width of what they write

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.decomposition.components import Components, Mask
from models.decomposition.known_answer import by_feature, matched, towards_features

MOST_ROWS, MOST_COLUMNS = 50, 60
SINGLE = 0.75  # the value of a single feature
OPEN = 0.1  # a component is needed if its gate is above this


def portraits(model: Components) -> dict[str, dict[str, Any]]:
    """Returns what components.html shows above the components of each matrix of a toy model, by the
    matrix's name. Inputs have a single feature.
    """
    net: Any = model.target.net
    singles_NN = SINGLE * torch.eye(net.features, dtype=model.dtype, device=_device(model))
    gates_NK = model.lower_gates(model.gate_logits(model.probe(singles_NN)[1])).detach()
    live_NK = gates_NK > OPEN
    made: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(model.names):
        columns = model.columns(number)
        live_C = live_NK[:, columns].any(0).cpu().numpy()
        made[name] = {"gates": _gates(gates_NK[:, columns].cpu().double().numpy(), live_C)}
        made[name] |= _directions(model, number, live_C)
    tables = between_matrices(model, singles_NN, gates_NK, live_NK.sum(0), "live components")
    return {name: each | tables.get(name, {}) for name, each in made.items()}


def _device(model: Components) -> torch.device:
    return next(model.parts.parameters()).device


def _gates(gates_NC: np.ndarray, live_C: np.ndarray) -> dict[str, Any]:
    """Returns a table of gates, with components in the order of the features that they match
    best.
    """
    _, own = matched(gates_NC)
    columns = [c for c in own if live_C[c]]
    columns += [c for c in live_C.nonzero()[0] if c not in columns]
    columns = columns[:MOST_COLUMNS]
    return {
        "rows": [str(feature) for feature in range(min(len(gates_NC), MOST_ROWS))],
        "columns": [f"c{c}" for c in columns],
        "values": gates_NC[:MOST_ROWS, columns].round(3).tolist(),
    }


def _directions(model: Components, number: int, live_C: np.ndarray) -> dict[str, Any]:
    """Returns the weights of each feature and what live components write, if both have two
    dimensions.
    """
    part = by_feature(model, number)
    if part is None or part[0].shape[1] != 2:
        return {}
    weights_ND, read_NC, written_CD = part
    return {
        "directions": {
            "weights": weights_ND.round(4).tolist(),
            "written": towards_features(read_NC, written_CD)[live_C].round(4).tolist(),
            "numbers": live_C.nonzero()[0].tolist(),
        }
    }


def between_matrices(
    model: Components,
    x: Tensor,
    gates: Tensor,
    needed: Tensor,
    whose: str,
    most: int = MOST_COLUMNS,
    documents: Tensor | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns, by the name of a matrix, a table of attributions to its components from those of the
    matrix before it.

    `needed` [K] says how often each component is needed. The table has the `most` needed components
    of each matrix; its title calls them `whose`.
    """
    shown = [_most_needed(needed[model.columns(i)], most) for i in range(len(model.names))]
    tables = {}
    for number, (before, sizes) in attributions(model, x, gates, shown, documents).items():
        sizes = sizes[:, shown[before]]
        if not sizes.numel():
            continue
        shares = sizes / max(1e-12, float(sizes.max()))
        tables[model.names[number]] = {
            "attributions": {
                "title": f"Attributions to {whose} (rows) from those of {model.names[before]}"
                " (columns), as shares of the largest",
                "rows": [f"c{c}" for c in shown[number]],
                "columns": [f"c{c}" for c in shown[before]],
                "values": shares.double().cpu().numpy().round(3).tolist(),
            }
        }
    return tables


def _most_needed(needed_C: Tensor, most: int) -> list[int]:
    """Returns the components that are needed most, in ascending order, without those that are not
    needed at all.
    """
    count = min(most, int((needed_C > 0).sum()))
    return needed_C.argsort(descending=True, stable=True)[:count].sort().values.tolist()


def attributions(
    model: Components,
    x: Tensor,
    gates: Tensor,
    chosen: Sequence[Sequence[int]],
    documents: Tensor | None = None,
) -> dict[int, tuple[int, Tensor]]:
    """Returns how much the chosen components of each matrix depend on those of the matrix before
    it, which is the last one whose outputs reach it.

    The keys are numbers of matrices, the values the number of the matrix before and attributions
    [chosen, C]. An attribution is the derivative of a component's activation times its gate, summed
    over the text, by the mask of the earlier component at a position, where all masks are 1:
    absolute values, as a mean over positions. Toy models have examples in place of positions.
    """
    activations: dict[int, Tensor] = {}
    masks: dict[int, Tensor] = {}

    def watching(number: int, given: Tensor) -> Tensor:
        activations[number] = model.activations(number, given)
        masks[number] = torch.ones_like(activations[number]).detach().requires_grad_()
        rest = masks[number].new_ones(1)  # with it, the net computes what the target does
        return model.multiply(number, given, Mask(masks[number], rest))

    made: dict[int, tuple[int, Tensor]] = {}
    with torch.enable_grad():
        numbers = range(len(model.names))
        model.run_with(x, {number: partial(watching, number) for number in numbers}, documents)
        for number in numbers:
            before = _last_that_reaches(activations[number], masks, number)
            if before is None or not chosen[number]:
                continue
            gated = activations[number] * gates[..., model.columns(number)]
            slopes = [
                torch.autograd.grad(gated[..., c].sum(), masks[before], retain_graph=True)[0]
                for c in chosen[number]
            ]
            made[number] = before, torch.stack(slopes).abs().flatten(1, -2).mean(1)
    return made


def _last_that_reaches(activations: Tensor, masks: Mapping[int, Tensor], number: int) -> int | None:
    """Returns the last matrix before this one whose masks its activations depend on. Queries, keys
    and values, for example, do not depend on each other.
    """
    for before in reversed(range(number)):
        (slope,) = torch.autograd.grad(
            activations.sum(), masks[before], retain_graph=True, allow_unused=True
        )
        if slope is not None:
            return before
    return None
