"""AdamATan2: Adam without epsilon. The ratio of the moments goes through atan2, which needs no
guard against zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.optim.optimizer import ParamsT

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamATan2(torch.optim.Optimizer):
    """Decoupled decay, bias-corrected moments, `lr * atan2(first, sqrt(second))`; runs foreach on
    every device, and never waits for the device.

    The step is counted once per group, as a plain int: bias corrections stay on the host and
    checkpoints stay small.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NonNegativeFloat,
        betas: tuple[Decay, Decay],
        weight_decay: NonNegativeFloat,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "step": 0}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        # lists for foreach: one launch for all parameters
        grads = [p.grad for p in params if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        # As published, only the second moment is corrected inside atan2; the first one's correction
        # scales the step.
        bias1, bias2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, bias2**0.5)
        for mean, update in zip(means, updates, strict=True):  # there is no foreach atan2
            torch.atan2(mean, update, out=update)
        torch._foreach_add_(params, updates, alpha=-lr / bias1)
