"""Exponential moving averages of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from utils.transfer import fill


class EMA:
    """Averages in float32. Sparse tables are not averaged, as in TRM's published code.

    The average of step t keeps `rate` of the old one, or with a warm-up min(rate, (1 + t) /
    (10 + t)): without one, an average of a short run consists mostly of the weights that it began
    with.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], rate: float, warms_up: bool = False
    ) -> None:
        self.steps = 0
        self._rate, self._warms_up = rate, warms_up
        self._parameters = dict(parameters)
        self._averages = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the new weights. Called after each step."""
        assert not self._applied, "the net holds averages now; a step would train them"
        self.steps += 1
        if not self._averages:
            return
        warm_up = (1 + self.steps) / (10 + self.steps)
        kept = min(self._rate, warm_up) if self._warms_up else self._rate
        torch._foreach_lerp_(
            list(self._averages.values()),
            [p.detach().float() for p in self._parameters.values()],
            1 - kept,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the net computes with the averages. Leaving it restores the weights
        bit by bit, also after an error.
        """
        assert not self._applied, "applied() does not nest"
        trained = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._applied = True
        try:
            self._put(self._averages)
            yield
        finally:
            self._put(trained)
            self._applied = False

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint holds; the next step changes them in place."""
        averages = {f"dense/{name}": average for name, average in self._averages.items()}
        return {"steps": torch.tensor(self.steps), **averages}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        for name, average in self._averages.items():
            fill(average, state[f"dense/{name}"])

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        # in place: gradient views and compiled code keep their addresses
        for name, p in self._parameters.items():
            p.copy_(values[name])
