"""PyTorch's own optimizers under names of this repository: a config can name these and nothing
outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from optim.muon import Muon
from utils.errors import ConfigError

Named = Iterable[tuple[str, nn.Parameter]]


def adamw(
    params: Named,
    lr: float,
    betas: Sequence[float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    matrices_only: bool = False,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Adam with decoupled decay, if asked for on matrices alone; fused: one kernel for all of a
    step, whose roundings are others.
    """
    beta1, beta2 = betas
    groups: list[dict[str, Any]] = [{"params": list(params)}]
    if matrices_only:
        named = groups[0]["params"]
        groups = [{"params": [each for each in named if each[1].ndim > 1]}]
        groups += [{"params": [each for each in named if each[1].ndim <= 1], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    way: dict[str, bool] = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(
        groups, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, eps=eps, **way
    )


def adadelta(
    params: Named, lr: float, rho: float = 0.9, weight_decay: float = 0.0, eps: float = 1e-6
) -> torch.optim.Optimizer:
    """Adadelta."""
    return torch.optim.Adadelta(
        params, lr=lr, rho=rho, weight_decay=weight_decay, eps=eps, foreach=True
    )


def sgd(
    params: Named,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(
        params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, foreach=True
    )


def muon(
    params: Named,
    lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
) -> torch.optim.Optimizer:
    """Muon on matrices, its step scaled by their shape as Jordan et al. (2024) do, so that
    published rates such as 0.02 hold.
    """
    params = list(params)
    for name, parameter in params:
        if parameter.ndim != 2:
            raise ConfigError(
                f"optim.dense: Muon takes matrices, but {name} has shape {tuple(parameter.shape)};"
                " leave it to a pattern with AdamW"
            )
    return Muon(
        params,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        adjust_lr_fn="original",
    )
