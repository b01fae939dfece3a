"""pretrain.py with optimizers that people install or write: `python -m
tests.ranks_installed_optimizers KIND key=value …`, with `optim=sgd`, whose place they take.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from torch import nn

import pretrain
from optim import builtin
from utils.command import cli

Named = Iterable[tuple[str, nn.Parameter]]


class GroupCounter(torch.optim.Optimizer):
    """Counts in its group, and takes smaller steps the later it is."""

    kind = "a constant attribute"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0, "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            norms = [float(p.grad.norm()) for p in group["params"]]
            group["largest"] = max(group["largest"], *norms)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["calls"] / (1 + group["largest"]))


class Orthogonal(torch.optim.Optimizer):
    """As Keller Jordan's Muon: momentum, made orthogonal as a whole matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                mean = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = mean / (mean.norm() + 1e-7)
                if p.ndim == 2:
                    u, _, v = torch.linalg.svd(update, full_matrices=False)
                    update = u @ v
                p.sub_(update, alpha=group["lr"])


class Preconditioned(torch.optim.Optimizer):
    """As Shampoo and SOAP: lists of matrices of other shapes, empty ones and None among them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "basis": None, "grams": [], "by_side": {0: None}}
                    state["grams"] = [torch.zeros(n, n) for n in p.shape] if p.ndim == 2 else []
                state["step"] += 1
                if state["grams"]:
                    state["grams"][0] += p.grad @ p.grad.T
                    state["by_side"][0] = state["grams"][0].diagonal().sqrt()
                    state["basis"] = (torch.ones(1), state["step"] / 3)
                scale = 1 if state["basis"] is None else state["by_side"][0].mean() + 1
                p.sub_(p.grad / scale, alpha=group["lr"] / state["step"])


class RandomStart(torch.optim.Optimizer):
    """Its state begins with random numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["probe"] = torch.randn_like(p)
                p.sub_(p.grad + 0.01 * state["probe"], alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, with its own `state_dict`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.calls = base, 0
        super().__init__(base.param_groups, {"lr": base.param_groups[0]["lr"]})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        if self.calls % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "calls": self.calls}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.base.load_state_dict(saved["base"])
        self.param_groups = self.base.param_groups  # it has made new ones
        self.slow, self.calls = saved["slow"], saved["calls"]


def graph_adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    """A rate that is a tensor, as for optimizers that are compiled."""
    return torch.optim.AdamW(params, lr=torch.tensor(lr), capturable=False, foreach=False)


TORCH = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop SGD"
KINDS: dict[str, Callable[..., Any]] = {
    **{name.lower(): getattr(torch.optim, name) for name in TORCH.split()},
    "lion": Lion,
    "prodigy": Prodigy,
    "schedulefree": AdamWScheduleFree,
    "rate in a tensor": graph_adamw,
    "counter": GroupCounter,
    "orthogonal": Orthogonal,
    "preconditioned": Preconditioned,
    "random start": RandomStart,
    "lookahead": lambda params, lr: Lookahead(torch.optim.SGD(params, lr=lr, momentum=0.9)),
}


def build(kind: str, params: Named, lr: float) -> torch.optim.Optimizer:
    """Builds one of these; `plain KIND` gets parameters without their names."""
    pairs = list(params)
    plain = kind.startswith("plain ")
    return KINDS[kind.removeprefix("plain ")]([p for _, p in pairs] if plain else pairs, lr=lr)


def main() -> None:
    kind, *arguments = sys.argv[1:]

    def sgd(params: Named, lr: float, momentum: float, weight_decay: float) -> Any:
        return build(kind, params, lr)

    sgd.__module__ = builtin.__name__  # a configuration names what a module of ours defines
    builtin.sgd = sgd
    sys.argv = ["pretrain.py", *arguments]
    cli.main(pretrain.app)


if __name__ == "__main__":
    main()
