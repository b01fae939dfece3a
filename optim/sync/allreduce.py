"""Manual all-reduce of gradients: flat buckets, sent while the last backward of a step still runs.

Every `p.grad` is a view into a bucket from its first arrival in a step on. Buckets leave in one
fixed order on all ranks, and a parameter without a gradient is a zero in its bucket, so ranks can
never disagree about what is next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from optim.sync.base import Sync, Verdict
from optim.sync.buckets import Bucket, fill_buckets, inverse_weight, magnitude, scale
from optim.sync.common import Common
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, NOTICES, Notices
from utils.transfer import to_host

LARGE = 1 << 14  # elements from which moving a gradient costs more than calling the mover


def build(bucket_mb: float, exact: bool, shards: int) -> Sync:
    """Builds `sync=allreduce`: the reducer below, or with `exact=true` the one in `exact.py`."""
    if not exact:
        return Reducer(bucket_mb)
    from optim.sync.exact import ExactReducer  # it extends the reducer below

    return ExactReducer(shards, bucket_mb)


class Reducer(Common):
    """Sums gradients over ranks and divides them once by the global weight."""

    name = "allreduce"

    def __init__(self, bucket_mb: float = 16.0) -> None:
        if not bucket_mb > 0:
            raise ConfigError(f"sync.bucket_mb={bucket_mb}: a bucket holds something; try 16")
        self.buckets: list[Bucket] = []
        self._bucket_mb = bucket_mb
        self._home: dict[str, Bucket] = {}
        # names in the order of the first step's backward; None once that is fixed
        self._arrivals: dict[str, None] | None = {}
        self._sending = False
        self._next = 0  # the bucket whose turn it is

    def wrap(self, objective: nn.Module, dist: Dist) -> nn.Module:
        """Lay out buckets for what trains; the objective is called as it is."""
        self.begin({name: p for name, p in objective.named_parameters() if p.requires_grad}, dist)
        self._lay_out(reversed(self.parameters))
        self._prepare()
        self.zero()
        return objective

    def zero(self) -> None:
        """Start a step: no gradients yet, wherever old ones were."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """During the last micro-batch buckets leave as soon as they are complete."""
        return self._overlapping() if last else nullcontext()

    @contextmanager
    def _overlapping(self) -> Iterator[None]:
        self._sending = True
        try:
            yield
        finally:
            self._sending = False

    def finish(
        self,
        weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Send what remains, and divide what comes back; on CUDA the host launches this and goes
        on.
        """
        with self.dist.waiting():
            self._send_rest(weights, checked, notices)
            with self._waited.running():
                for bucket in self.buckets:
                    bucket.wait()
        finite = [bucket.finite() for bucket in self.buckets] if late else []
        status = to_host(torch.cat([self.buckets[-1].tail, *finite]))
        scale(self._grads(), inverse_weight(self.buckets[-1].tail[0]))
        return lambda: self._verdict(status)

    def _verdict(self, status: Callable[[], list[float]]) -> Verdict:
        with self.dist.waiting():
            total, magnitudes, noticed, finite = self._split_status(status())
        bad = [rank for rank, share in enumerate(magnitudes) if not math.isfinite(share)]
        # Shares of what the dtype holds bound the sums, so the gradients need be looked at only
        # next to an overflow.
        if not bad and math.isfinite(total) and sum(magnitudes) <= 0.99:
            return Verdict(total, True, [], None, noticed)
        names = [name for bucket in self.buckets for name in bucket.views]
        known = dict(
            zip(
                names,
                finite or torch.cat([bucket.finite() for bucket in self.buckets]).tolist(),
                strict=True,
            )
        )
        first = next((name for name in self.parameters if not known[name]), None)
        return Verdict(
            total, not bad and math.isfinite(total) and first is None, bad, first, noticed
        )

    def _prepare(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._arrival(name))

    def _grads(self) -> list[Tensor]:
        return [bucket.grads for bucket in self.buckets]

    def _sum_over_ranks(self, bucket: Bucket) -> None:
        bucket.send(self.dist)

    def _lay_out(self, order: Iterable[str]) -> None:
        """Make buckets of the parameters in this order."""
        # The status (weight, one number per rank, notices) rides at the end of the last message
        # instead of costing its own.
        ordered = {name: self.parameters[name] for name in order}
        self.buckets = fill_buckets(
            ordered,
            self._bucket_mb,
            tail=1 + self.dist.world_size + NOTICES,
            device=self.dist.device,
        )
        self._home = {name: bucket for bucket in self.buckets for name in bucket.parameters}

    def _fix_order(self) -> None:
        """Before anything is first sent: buckets in the order in which rank 0's backward filled
        them.

        The order in which a net registers its parameters says little, and a bucket that completes
        last holds up all others. Nothing leaves before this, so every step, also the first one
        after a resume, adds in the same layout.
        """
        arrived = list(self._arrivals or ())
        rest = [name for name in reversed(self.parameters) if name not in set(arrived)]
        self._lay_out(
            self.dist.broadcast_text("\n".join(arrived + rest)).split("\n")
            if self.parameters
            else []
        )
        self._arrivals = None

    def _arrival(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._arrivals is not None:
                self._arrivals.pop(name, None)  # of several micro-batches the last one counts
                self._arrivals[name] = None
                return
            bucket = self._home[name]
            if bucket.sent:
                raise RuntimeError(
                    f"a gradient of {name} arrived after its bucket was sent; only the last"
                    " backward of a step is last=True"
                )
            if not self._sending or parameter.numel() >= LARGE:
                # at once, while it is in the cache; small ones wait for each other to save calls
                bucket.move_in([name])
            if not self._sending:
                return
            bucket.missing.discard(name)
            if not bucket.missing:
                self._send_complete()

        return arrived

    def _send_complete(self) -> None:
        """Send complete buckets in turn; the last one waits for the status it carries."""
        while self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        bucket.close()
        self._sum_over_ranks(bucket)
        self._next += 1

    def _send_rest(
        self, weights: Sequence[Tensor | float], checked: Sequence[Tensor], notices: Notices
    ) -> None:
        if self._arrivals is not None:
            self._fix_order()
        while self._next < len(self.buckets) - 1:
            self._send(self.buckets[self._next])
        last = self.buckets[-1]
        last.close()
        last.tail.copy_(
            self._status(
                weights,
                [bucket.magnitude for bucket in self.buckets] + [magnitude(t) for t in checked],
                notices,
            )
        )
        self._sum_over_ranks(last)
        self._next += 1
