"""PyTorch's DistributedDataParallel, with sums in place of its means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optim.sync.base import Verdict
from optim.sync.buckets import magnitude
from optim.sync.common import Common
from utils.errors import ConfigError, RunError
from utils.ranks import distributed
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, Notices


class DDP(Common):
    """Around the training pass of an objective. Buffers, and with them sparse tables, are nobody's
    business here.
    """

    name = "ddp"

    def __init__(
        self,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        if not bucket_mb > 0:
            raise ConfigError(f"sync.bucket_mb={bucket_mb}: a bucket holds something; try 25")
        self._bucket_mb, self._finds_unused, self._static = (
            bucket_mb,
            find_unused_parameters,
            static_graph,
        )
        self._net: DistributedDataParallel | None = None
        self._missing = 0  # elements of gradients that have not left yet in this step

    def wrap(self, objective: nn.Module, dist: Dist) -> nn.Module:
        """Returns a module that calls the objective through DDP, from the first step on."""
        self.begin({name: p for name, p in objective.named_parameters() if p.requires_grad}, dist)
        self._inside = LossInSight(objective)
        return Calling(
            lambda *given: with_loss(*(self._inside if self._net is None else self._net)(*given))
        )

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """DDP reads in its forward whether it is to reduce, so `no_sync` stands around that,
        too.
        """
        # Not in `wrap`: rehearsals would set off its hooks. A static graph is learned from a pass
        # that is reduced.
        if self._net is None and (last or not self._static):
            self._net = self._wrapped()
        self._missing = sum(p.numel() for p in self.parameters.values())
        alone = nullcontext() if last or self._net is None else self._net.no_sync()
        with self.dist.waiting() if last else alone:
            yield

    def finish(
        self,
        weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Every bucket must have left: DDP itself would say so in the next step, in a page."""
        if self._missing and not self._finds_unused:
            raise RunError(
                "sync.find_unused_parameters=false: the last micro-batch of a step left parameters"
                " without a gradient; set sync.find_unused_parameters=true, or use sync=allreduce"
            )
        return super().finish(weights, checked, notices, late)

    def _wrapped(self) -> DistributedDataParallel:
        known = inspect.signature(DistributedDataParallel).parameters
        # before 2.13
        apart: dict[str, Any] = {
            (
                "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            ): False
        }
        net = DistributedDataParallel(
            self._inside,
            process_group=distributed.group(self.dist),
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
            static_graph=self._static,
            init_sync=False,
            **apart,  # all ranks have the same ones
        )
        # its annotations, were there any, must be no strings
        net.register_comm_hook(None, lambda state, bucket: self._sum(bucket))
        return net

    def _sum(self, bucket: c10d.GradBucket) -> torch.futures.Future[Tensor]:
        """In place of a mean over ranks, which would have to be undone; on the way it is noted what
        this rank adds.
        """
        flat = bucket.buffer()
        self.magnitudes.append(magnitude(flat))
        self._missing -= sum(gradient.numel() for gradient in bucket.gradients())
        work = c10d.all_reduce(flat, group=distributed.group(self.dist), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


class LossInSight(nn.Module):
    """Wrappers look for the loss in tuples, and not inside of what objectives return."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, *given: Any) -> tuple[Tensor, Any]:
        out = self.objective(*given)
        return out.loss, with_loss(out.loss.detach(), out)


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def with_loss(loss: Tensor, out: Any) -> Any:
    """Returns a copy of an objective's output with another loss."""
    return replace(out, loss=loss)
