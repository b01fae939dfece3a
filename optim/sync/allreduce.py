"""All-reduces gradients in flat buckets, while the last backward pass of a step still runs.

Once autograd has made a gradient, `p.grad` is a view into a bucket. All ranks send buckets in the
same fixed order, with zeros for parameters without a gradient, so their messages always match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from optim.sync.base import Sync, Verdict
from optim.sync.buckets import Bucket, fill_buckets, inverse_weight, magnitude, scale
from optim.sync.common import Common
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, NOTICES, Notices
from utils.transfer import to_host

LARGE = 1 << 14  # elements from which copying a gradient costs more than the call


def build(bucket_mb: PositiveFloat, exact: bool, shards: int) -> Sync:
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
        self._bucket_of: dict[str, Bucket] = {}  # by parameter
        # parameters in the order in which the first step's backward reaches them; None once fixed
        self._arrivals: dict[str, None] | None = {}
        self._sending = False
        self._next = 0  # the number of the next bucket to send

    def wrap(self, objective: nn.Module, dist: Dist) -> nn.Module:
        """Lays out buckets for the trainable parameters. Returns the objective itself."""
        self.begin({name: p for name, p in objective.named_parameters() if p.requires_grad}, dist)
        self._lay_out(reversed(self.parameters))
        self._prepare()
        self.zero()
        return objective

    def zero(self) -> None:
        """Begins a step: clears all gradients."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Returns a context in which complete buckets are sent at once, if `last`."""
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
        loss_weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Sends the remaining buckets and divides the sums. On CUDA the host does not wait."""
        with self.dist.waiting():
            self._send_rest(loss_weights, checked, notices)
            with self._waited.running():
                for bucket in self.buckets:
                    bucket.wait()
        finite = [bucket.finite() for bucket in self.buckets] if late else []
        status = to_host(torch.cat([self.buckets[-1].tail, *finite]))
        scale(self.gradients(), inverse_weight(self.buckets[-1].tail[0]))
        return lambda: self._verdict(status)

    def _verdict(self, status: Callable[[], list[float]]) -> Verdict:
        with self.dist.waiting():
            total, magnitudes, noticed, finite = self._split_status(status())
        bad = [rank for rank, share in enumerate(magnitudes) if not math.isfinite(share)]
        # magnitudes bound the sums, so gradients are inspected only near an overflow
        if not bad and math.isfinite(total) and sum(magnitudes) <= 0.99:
            return Verdict(total, True, [], None, noticed)
        names = [name for bucket in self.buckets for name in bucket.views]
        flags = finite or torch.cat([bucket.finite() for bucket in self.buckets]).tolist()
        is_finite = dict(zip(names, flags, strict=True))
        first = next((name for name in self.parameters if not is_finite[name]), None)
        return Verdict(
            total, not bad and math.isfinite(total) and first is None, bad, first, noticed
        )

    def _prepare(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook_for(name))

    def gradients(self) -> list[Tensor]:
        """Returns a flat tensor for each bucket."""
        return [bucket.grads for bucket in self.buckets]

    def _sum_over_ranks(self, bucket: Bucket) -> None:
        bucket.send(self.dist)

    def _lay_out(self, order: Iterable[str]) -> None:
        """Makes buckets of the parameters in this order."""
        # the status (weight, one number per rank, notices) is sent with the last bucket, which
        # saves a message
        ordered = {name: self.parameters[name] for name in order}
        self.buckets = fill_buckets(
            ordered,
            self._bucket_mb,
            tail=1 + self.dist.world_size + NOTICES,
            device=self.dist.device,
        )
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parameters}

    def _fix_order(self) -> None:
        """Lays out buckets again, in the order in which rank 0's first backward pass reached the
        parameters.

        The order in which a net registers its parameters says little, and a bucket that completes
        late holds up all others. Called before anything is sent, so that every step, also the first
        one after a resume, adds in the same layout.
        """
        arrived = list(self._arrivals or ())
        rest = [name for name in reversed(self.parameters) if name not in set(arrived)]
        if self.parameters:
            self._lay_out(self.dist.broadcast_text("\n".join(arrived + rest)).split("\n"))
        else:
            self._lay_out([])
        self._arrivals = None

    def _hook_for(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if self._arrivals is not None:
                self._arrivals.pop(name, None)  # the last micro-batch counts
                self._arrivals[name] = None
                return
            bucket = self._bucket_of[name]
            if bucket.sent:
                raise RuntimeError(
                    f"a gradient of {name} arrived after its bucket was sent; only the last"
                    " backward of a step is last=True"
                )
            if not self._sending or parameter.numel() >= LARGE:
                # large gradients at once, while they are in the cache; small ones together, to
                # save calls
                bucket.move_in([name])
            if not self._sending:
                return
            bucket.missing.discard(name)
            if not bucket.missing:
                self._send_complete()

        return on_gradient

    def _send_complete(self) -> None:
        """Sends complete buckets in order, except the last one, which waits for the status."""
        while self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        bucket.close()
        self._sum_over_ranks(bucket)
        self._next += 1

    def _send_rest(
        self, loss_weights: Sequence[Tensor | float], checked: Sequence[Tensor], notices: Notices
    ) -> None:
        if self._arrivals is not None:
            self._fix_order()
        while self._next < len(self.buckets) - 1:
            self._send(self.buckets[self._next])
        last = self.buckets[-1]
        last.close()
        last.tail.copy_(
            self._status(
                loss_weights,
                [bucket.magnitude for bucket in self.buckets] + [magnitude(t) for t in checked],
                notices,
            )
        )
        self._sum_over_ranks(last)
        self._next += 1
