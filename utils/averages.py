"""Exponential moving averages of the dense weights and, lazily, of the sparse tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.transfer import fill

ROWS_AT_ONCE = 1 << 16  # a whole table is walked in blocks: temporaries stay small
LONGEST = 1 << 20  # steps of a warm-up: it ends here even if the rate is very near 1
DIGIT = 1 << 11  # three digits of this base make any number of steps


class Table(Protocol):
    weights: Tensor


class EMA:
    """Averages in float32. A table's row is brought up to date only before it changes or is read:
    between two changes its weights are constant, so several updates are one by the product of
    their rates.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tables: Mapping[str, Table],
        rate: float,
        warms_up: bool = False,
    ) -> None:
        self.steps = 0
        self._parameters = dict(parameters)
        self._tables = dict(tables)
        self._dense = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._rows = {
            name: table.weights.detach().float().clone() for name, table in self._tables.items()
        }
        self._decay = Decay(rate, warms_up)
        self._decays = {
            name: Decay(rate, warms_up, rows.device) for name, rows in self._rows.items()
        }
        # the step up to which each row's average is up to date
        self._seen = {
            name: torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
            for name, rows in self._rows.items()
        }
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the new weights. Called after each step."""
        assert not self._applied, "the net holds averages now; a step would train them"
        self.steps += 1
        if self._dense:
            torch._foreach_lerp_(
                list(self._dense.values()),
                [p.detach().float() for p in self._parameters.values()],
                1 - self._decay.at(self.steps),
            )

    @torch.no_grad()
    def before_rows_change(
        self, name: str, weights: Tensor, ids: Tensor, any_change: Tensor
    ) -> None:
        """Brings the averages of rows up to date before their weights change, unless `any_change`
        is false. A hook of the sparse optimizer.
        """
        if name not in self._rows:
            return
        rows, seen = (
            tensor.index_select(0, ids) for tensor in (self._rows[name], self._seen[name])
        )
        steps = torch.where(any_change, self.steps, seen)
        self._rows[name].index_copy_(
            0, ids, self._catch_up_rows(name, rows, weights.index_select(0, ids), seen, steps)
        )
        self._seen[name].index_copy_(0, ids, steps)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the net computes with the averages. Leaving it restores the weights
        bit by bit, also after an error.
        """
        assert not self._applied, "applied() does not nest"
        saved = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._catch_up()
        try:
            self._applied = True
            self._load(self._dense)
            self._exchange_tables()
            yield
        finally:
            self._exchange_tables()
            self._load(saved)
            self._applied = False

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint holds; the next step changes them in place."""
        state = {"steps": torch.tensor(self.steps)}
        for kind, tensors in self._kinds().items():
            state |= {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores a saved `state`."""
        self.steps = int(state["steps"])
        for kind, tensors in self._kinds().items():
            for name, tensor in tensors.items():
                fill(tensor, state, f"{kind}/{name}")

    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        return {"dense": self._dense, "rows": self._rows, "seen": self._seen}

    def _catch_up_rows(
        self, name: str, rows: Tensor, weights: Tensor, seen: Tensor, steps: Tensor
    ) -> Tensor:
        # `lerp` may round a row differently by its position in the tensor
        towards = (1 - self._decays[name].between(seen, steps)).float()[:, None]
        return rows + (weights.float() - rows) * towards

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Brings all rows up to date."""
        for name, table in self._tables.items():
            for block in _blocks(len(table.weights)):
                rows, seen = self._rows[name][block], self._seen[name][block]
                steps = torch.full_like(seen, self.steps)
                rows.copy_(self._catch_up_rows(name, rows, table.weights[block], seen, steps))
            self._seen[name].fill_(self.steps)

    @torch.no_grad()
    def _load(self, values: Mapping[str, Tensor]) -> None:
        # in place: gradient views and compiled code keep their addresses
        for name, p in self._parameters.items():
            p.copy_(values[name])

    @torch.no_grad()
    def _exchange_tables(self) -> None:
        for name, table in self._tables.items():
            for block in _blocks(len(table.weights)):
                rows = table.weights[block].clone()
                table.weights[block] = self._rows[name][block]
                self._rows[name][block] = rows


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, rows, ROWS_AT_ONCE))


class Decay:
    """Rates of an average by step, counted from 1, and products of them.

    The rate of step t is `rate`, or with a warm-up min(rate, (1 + t) / (10 + t)): without one, an
    average of a short run consists mostly of the weights that it began with.

    The products come from tables, because `pow` may round a number differently by its position in
    a tensor, and a rank may hold only a part of it.
    """

    def __init__(self, rate: float, warms_up: bool, device: torch.device | None = None) -> None:
        # (1 + t) / (10 + t) reaches the rate in this step
        steps = min(math.ceil((10 * rate - 1) / (1 - rate)), LONGEST) if warms_up else 0
        self.rate, self._steps = rate, max(0, steps)
        rates = [1.0, *map(self.at, range(1, self._steps + 1))]
        # products of the first rates
        self._warm_up = torch.tensor(rates, dtype=torch.float64).cumprod(0).to(device)
        powers = [[rate ** (digit << shift) for digit in range(DIGIT)] for shift in (0, 11, 22)]
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)

    def at(self, step: int) -> float:
        """Returns the share of the old average that this step keeps."""
        return min(self.rate, (1 + step) / (10 + step)) if step <= self._steps else self.rate

    def between(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the product of the rates of all steps after `before`, up to `after`."""
        last = self._steps
        warm = self._warm_up[after.clamp(max=last)] / self._warm_up[before.clamp(max=last)]
        steps = after.clamp(min=last) - before.clamp(min=last)
        low, middle, high = (
            powers[(steps >> shift) % DIGIT]
            for shift, powers in zip((0, 11, 22), self._powers, strict=True)
        )
        return warm * (low * middle * high)
