"""PyTorch's DistributedDataParallel, with sums in place of its means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as c10d
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Doc

from optim.sync.base import Sync
from utils.errors import RunError
from utils.ranks import distributed
from utils.ranks.distributed import Dist


class DDP(Sync):
    """Wraps the training pass of an objective. Buffers, such as sparse tables, are not synced."""

    def __init__(
        self,
        bucket_mb: Annotated[float, Field(ge=1)],
        find_unused_parameters: Annotated[
            bool, Doc("for nets that leave out parameters in some steps")
        ],
        static_graph: Annotated[bool, Doc("for nets that do the same in every step")],
    ) -> None:
        self._bucket_mb, self._static = bucket_mb, static_graph
        self._finds_unused = find_unused_parameters
        self._net: DistributedDataParallel | None = None
        self._missing = 0  # elements of gradients that are not sent yet in this step

    def wrap(self, objective: nn.Module, dist: Dist) -> None:
        super().wrap(objective, dist)
        self._inside = OuterUnit(objective)

    def forward(self, *arguments: Any) -> Any:
        """Calls the objective through DDP, from the first step on."""
        net = self._inside if self._net is None else self._net
        return with_loss(*net(loss_and_output, self.objective, *arguments))

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch. DDP decides in forward whether it reduces, so
        `no_sync` must contain forward too.
        """
        # not built in `wrap`, because passes that measure memory would trigger its hooks; a static
        # graph is learned from a pass that reduces
        if self._net is None and (last or not self._static):
            self._net = self._make_ddp()
        self._missing = sum(p.numel() for p in self.parameters.values())
        alone = nullcontext() if last or self._net is None else self._net.no_sync()
        with self.dist.waiting() if last else alone:
            yield

    def sum_gradients(self) -> None:
        """Checks that DDP has sent every gradient. Its own error would come only in the next step,
        and fill a page.
        """
        if self._missing and not self._finds_unused:
            raise RunError(
                "sync.find_unused_parameters=false: the last micro-batch of a step left parameters"
                " without a gradient; set sync.find_unused_parameters=true, or use sync=allreduce"
            )
        super().sum_gradients()

    def _make_ddp(self) -> DistributedDataParallel:
        known = inspect.signature(DistributedDataParallel).parameters
        # `broadcast_buffers` before PyTorch 2.13
        new = "forward_sync_buffers"
        buffers: dict[str, Any] = {new if new in known else "broadcast_buffers": False}
        net = DistributedDataParallel(
            self._inside,
            process_group=distributed.group(self.dist),
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
            static_graph=self._static,
            init_sync=False,  # all ranks have the same weights already
            **buffers,
        )
        # a lambda, because DDP checks annotations and rejects those that are strings
        net.register_comm_hook(None, lambda state, bucket: self._sum(bucket))
        return net

    def _sum(self, bucket: c10d.GradBucket) -> torch.futures.Future[Tensor]:
        """Sums a bucket over ranks, in place of DDP's mean."""
        # counts what is sent: a bucket that lacks a gradient never is
        flat = bucket.buffer()
        self._missing -= sum(gradient.numel() for gradient in bucket.gradients())
        work = c10d.all_reduce(flat, group=distributed.group(self.dist), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


class OuterUnit(nn.Module):
    """Runs any call of an objective as its own forward pass, on which DDP and FSDP hang hooks."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)


def loss_and_output(forward: Callable[..., Any], *arguments: Any) -> tuple[Tensor, Any]:
    """Returns the loss by itself, too: DDP and FSDP find tensors in a tuple, but not in a
    dataclass.
    """
    out = forward(*arguments)
    return out.loss, with_loss(out.loss.detach(), out)


def with_loss(loss: Tensor, out: Any) -> Any:
    """Returns a copy of an objective's output with another loss."""
    return replace(out, loss=loss)
