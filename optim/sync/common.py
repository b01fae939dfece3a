"""The base of all syncs: sums of statistics, the status message, and norms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optim.sync.base import Verdict
from optim.sync.buckets import finite, inverse_weight, magnitude, scale
from utils.checkpoint.format import RowRange
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, NOTICES, Notices
from utils.transfer import to_device, to_host

SPANS = 500  # measured on CUDA before the older half is added up


class Common:
    """Assumes that every rank holds whole tensors, and that gradients are summed over ranks by the
    end of the last backward pass. Syncs that differ override methods.
    """

    name: str
    splits_weights = False
    parameters: dict[str, nn.Parameter]
    dist: Dist
    magnitudes: list[Tensor]  # `magnitude` of what this rank has added to the sums

    def begin(self, parameters: Mapping[str, nn.Parameter], dist: Dist) -> None:
        """Sets the parameters to optimise and the ranks. Called by `wrap`."""
        self.parameters, self.dist, self.magnitudes = dict(parameters), dist, []
        self._waited = Stopwatch(dist.device)

    def take_wait_s(self) -> float:
        """Returns the seconds spent, since the last call, waiting for gradients after the backward
        pass and for statistics.
        """
        return self._waited.read()

    def zero(self) -> None:
        """Begins a step: clears all gradients."""
        self.magnitudes = []
        for parameter in self.parameters.values():
            parameter.grad = None

    def sum_statistics(self, statistics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Sums statistics over micro-batches and ranks, with one message if there are any."""
        if not any(statistics):
            return {}
        like = statistics[0]
        names = sorted(like)
        assert all(sorted(each) == names for each in statistics), (
            "statistics must have the same names in every micro-batch"
        )

        def in_one_row(named: Mapping[str, Tensor]) -> Tensor:
            values = [named[name].detach() for name in names]
            wide = [value.to(self.dist.device, torch.float64).flatten() for value in values]
            return torch.cat(wide)

        rows = [in_one_row(each) for each in statistics]
        with self._waited.running():
            total = self._over_ranks(self._over_micro_batches(rows))
        pieces = total.split([like[name].numel() for name in names])
        return {
            name: piece.view_as(like[name]).to(like[name].dtype)
            for name, piece in zip(names, pieces, strict=True)
        }

    def finish(
        self,
        loss_weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Sums the status message over ranks and divides the gradients. On CUDA the host does not
        wait.
        """
        self.collect_gradients()
        grads = self.gradients()
        status = torch.cat(
            [
                self._status(loss_weights, [*self.magnitudes, *map(magnitude, checked)], notices),
                finite(grads),
            ]
        )
        with self.dist.waiting(), self._waited.running():
            self.dist.all_reduce(status)
        scale(grads, inverse_weight(status[0]))
        read = to_host(status)
        return lambda: self._verdict_on(read)

    def clip(self, max_norm: float, names: Collection[str] | None = None) -> Tensor:
        """Scales dense gradients to a norm of at most `max_norm` together; returns the norm before,
        still on the device.
        """
        grads = self.gradients() if names is None else self._grads_of(names)
        norm = self.norm(grads)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type == "cpu" and factor == 1:  # saves a pass; a GPU would be waited for
            return norm
        for grad in grads:
            grad.mul_(factor)
        return norm

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the norm of all these parameters, gradients or updates together."""
        # at least float32, because sums of squares overflow in half precision
        wide = [
            torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for t in tensors
        ]
        return self._norm_over_ranks(torch.linalg.vector_norm(torch.stack(wide)))

    def row_range(self, name: str, ndim: int) -> RowRange | None:
        """Returns None: every rank holds all rows."""
        return None

    def collect_gradients(self) -> None:
        """Called by `finish`, before anything else: gives every parameter a gradient, zero if it
        has none. A sync that has summed nothing so far sums here.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, for dividing and clipping."""
        return [
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        ]

    def _grads_of(self, names: Collection[str]) -> list[Tensor]:
        grads = (self.parameters[name].grad for name in names)
        return [grad for grad in grads if grad is not None]

    def _norm_over_ranks(self, norm: Tensor) -> Tensor:
        return norm

    def _total(self, loss_weights: Sequence[Tensor | float]) -> Tensor:
        return torch.as_tensor(sum(loss_weights), dtype=torch.float32, device=self.dist.device)

    def _over_micro_batches(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)).sum(0)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        self.dist.all_reduce(tensor)
        return tensor

    def _status(
        self,
        loss_weights: Sequence[Tensor | float],
        magnitudes: Sequence[Tensor],
        notices: Notices,
    ) -> Tensor:
        """Returns this rank's status message, to be summed over ranks.

        It holds the weight, the largest gradient of each rank in an entry of its own, and the
        notices.
        """
        status = torch.zeros(1 + self.dist.world_size + NOTICES, device=self.dist.device)
        status[0] = weight = self._total(loss_weights)
        # max() keeps NaN, and 0 * weight is NaN if the weight is not finite
        status[1 + self.dist.rank] = (
            torch.stack([torch.zeros_like(weight), *magnitudes]).max() + 0 * weight
        )
        if notices:
            status[-NOTICES:] = to_device(torch.tensor(notices.numbers()), self.dist.device)
        return status

    def _split_status(
        self, status: Sequence[float]
    ) -> tuple[float, list[float], Notices, list[float]]:
        """Splits a summed status into weight, magnitudes by rank, notices, and the rest."""
        ranks, end = self.dist.world_size, 1 + self.dist.world_size + NOTICES
        return (
            status[0],
            list(status[1 : 1 + ranks]),
            Notices.from_numbers(status[1 + ranks : end]),
            list(status[end:]),
        )

    def _verdict_on(self, read: Callable[[], list[float]]) -> Verdict:
        with self.dist.waiting():
            total, magnitudes, noticed, counts = self._split_status(read())
        bad = [rank for rank, share in enumerate(magnitudes) if not math.isfinite(share)]
        known = zip(self.parameters, counts, strict=True)
        first = next((name for name, ranks in known if ranks < self.dist.world_size), None)
        return Verdict(
            total, not bad and math.isfinite(total) and first is None, bad, first, noticed
        )


class Stopwatch:
    """Adds up time spent waiting; on CUDA by events, so that the host does not wait to measure."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose time is counted: the host's, or on CUDA the stream's."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))
        if len(self._spans) == 2 * SPANS:  # events must not pile up until somebody reads
            self._add(self._spans[:SPANS])
            del self._spans[:SPANS]

    def read(self) -> float:
        """Returns the seconds counted since the last call."""
        self._add(self._spans)
        seconds, self._seconds, self._spans = self._seconds, 0.0, []
        return seconds

    def _add(self, spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        for begin, end in spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
