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
    params: Named, lr: float, betas: Sequence[float], weight_decay: float, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Adam with decoupled decay."""
    beta1, beta2 = betas
    return torch.optim.AdamW(
        params, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, eps=eps, fused=True
    )


def adamw_matrices(
    params: Named, lr: float, betas: Sequence[float], weight_decay: float, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Adam with decoupled decay on matrices alone."""
    beta1, beta2 = betas
    named = list(params)
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    others = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=(beta1, beta2),
        weight_decay=weight_decay,
        eps=eps,
        fused=True,
    )


def adadelta(
    params: Named, lr: float, weight_decay: float, rho: float = 0.9, eps: float = 1e-6
) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(
        params, lr=lr, rho=rho, weight_decay=weight_decay, eps=eps, foreach=True
    )


def sgd(
    params: Named,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True
    )


def muon(
    params: Named,
    lr: float,
    momentum: float,
    weight_decay: float,
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
