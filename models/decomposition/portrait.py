"""What toy models show of each matrix: gates by feature, directions, and attributions."""

# N features, C components of a matrix, K of all matrices, D numbers that they write

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.decomposition.components import Components, Mask
from models.decomposition.known_answer import by_feature, matched, towards_features

MOST_ROWS, MOST_COLUMNS = 50, 60
SINGLE = 0.75  # the size of a feature that is there alone
OPEN = 0.1  # a gate of more than this needs its component


def portraits(model: Components) -> dict[str, dict[str, Any]]:
    """By the name of each matrix of a toy model, what components.html shows above its components.

    Inputs are single features.
    """
    net: Any = model.target.net
    singles_NN = SINGLE * torch.eye(net.features, dtype=model.dtype, device=_device(model))
    gates_NK = model.lower_gates(model.gate_logits(model.probe(singles_NN)[1])).detach()
    live_K = (gates_NK > OPEN).any(0)
    made: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(model.names):
        columns = model.columns(number)
        live_C = live_K[columns].cpu().numpy()
        made[name] = {"gates": _gates(gates_NK[:, columns].cpu().double().numpy(), live_C)}
        made[name] |= _directions(model, number, live_C)
        if number:
            made[name] |= _between(model, number, singles_NN, gates_NK, live_K)
    return made


def _device(model: Components) -> torch.device:
    return next(model.parts.parameters()).device


def _gates(gates_NC: np.ndarray, live_C: np.ndarray) -> dict[str, Any]:
    """A table of gates: components in the order of the features that they suit best."""
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
    """The weights of each feature, and what live components write, where they are in a plane."""
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


def _between(
    model: Components, number: int, x: Tensor, gates_NK: Tensor, live_K: Tensor
) -> Mapping[str, Any]:
    """Attributions from components of the matrix before to those of this one."""
    columns = [model.columns(number - 1), model.columns(number)]
    before, here = (live_K[each].nonzero().flatten()[:MOST_COLUMNS] for each in columns)
    if not len(before) or not len(here):
        return {}
    sizes = attributions(model, number, x, here.tolist())[:, before]
    largest = max(1e-12, float(sizes.max()))
    name = model.names[number - 1]
    return {
        "attributions": {
            "title": f"Attributions to live components (rows) from those of {name} (columns), as"
            " shares of the largest",
            "rows": [f"c{c}" for c in here.tolist()],
            "columns": [f"c{c}" for c in before.tolist()],
            "values": [[round(value / largest, 3) for value in row] for row in sizes.tolist()],
        }
    }


def attributions(model: Components, number: int, x: Tensor, chosen: list[int]) -> Tensor:
    """How much the activation of each chosen component of a matrix depends on each component of the
    matrix before: the derivative by its mask, where all masks are 1, as a mean over inputs of its
    absolute value.
    """
    first = number - 1
    masks_NC = x.new_ones(len(x), model.counts[first]).requires_grad_()
    seen: list[Tensor] = []

    def watching(given: Tensor) -> Tensor:
        seen.append(given @ model.factors(number)[0].to(given.dtype))
        return model.original(number, given)

    with torch.enable_grad():
        model.run_with(
            x, {first: partial(model.multiply, first, mask=Mask(masks_NC)), number: watching}
        )
        rows = [
            torch.autograd.grad(seen[0][:, c].sum(), masks_NC, retain_graph=True)[0].abs().mean(0)
            for c in chosen
        ]
    return torch.stack(rows).detach().cpu()
