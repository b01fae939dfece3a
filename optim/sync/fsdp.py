"""PyTorch's fully_shard (FSDP2): every rank keeps a share of each parameter, and gathers the whole
parameter only while it is needed.

Optimizers and averages get plain tensors, each a rank's share of a parameter, and no DTensor. A
share is what `Tensor.chunk` returns along the first dimension, so it may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import Doc

from optim.sync.base import Sync
from optim.sync.ddp import OuterUnit, loss_and_output, with_loss
from utils.errors import ConfigError
from utils.ranks import distributed
from utils.ranks.distributed import Dist


class FSDP(Sync):
    """Splits every block of the net by itself, and all other parameters as one outer unit. Calls of
    the objective that need weights go through the outer unit.
    """

    splits_weights = True

    def __init__(
        self,
        reshard_after_forward: Annotated[
            bool,
            Doc(
                "frees a block's weights after its forward pass, and fetches them again for its "
                "backward pass"
            ),
        ],
    ) -> None:
        self._reshards = reshard_after_forward

    def wrap(self, objective: Any, dist: Dist) -> None:
        """Splits the parameters. The objective's methods gather them from now on."""
        trained = [p for p in objective.parameters() if p.requires_grad]
        if len(kinds := {p.dtype for p in trained}) > 1 or any(p.ndim == 0 for p in trained):
            raise ConfigError(
                "sync=fsdp: splits parameters of one type with a dimension, and this net has"
                f" {kinds}; use sync=allreduce"
            )
        self._mesh = DeviceMesh.from_group(distributed.group(dist), dist.device.type)
        # each block by itself, then what is left as the outer unit
        root = OuterUnit(objective)
        frozen = {p for p in objective.parameters() if not p.requires_grad}
        for block in getattr(objective, "blocks", ()):
            fully_shard(
                block, mesh=self._mesh, reshard_after_forward=self._reshards, ignored_params=frozen
            )
        # the outer unit's weights are needed again at once
        self._root: Any = fully_shard(
            root, mesh=self._mesh, reshard_after_forward=False, ignored_params=frozen
        )
        self._units: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
        for unit in self._units:  # sums in place of means
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # tied parameters have several names
        self._split: dict[str, Any] = {
            name: p
            for name, p in objective.named_parameters(remove_duplicate=False)
            if p.requires_grad
        }
        super().wrap(objective, dist)
        # optimizers see plain tensors, which share memory with FSDP's own
        self.parameters = {
            name: nn.Parameter(p.to_local().detach())
            for name, p in objective.named_parameters()
            if p.requires_grad
        }
        self._route_calls(objective)

    def zero(self) -> None:
        super().zero()
        for parameter in self._split.values():
            parameter.grad = None

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch. Gradients are accumulated whole on each rank
        until the last one, and the outer unit stays gathered.
        """
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self._reshards)
        self._root.set_reshard_after_backward(last, recurse=False)
        with self.dist.waiting():  # every pass is full of messages
            yield

    def share_of(self, name: str, whole: Tensor) -> Tensor:
        owner = self._owner(name)
        if owner is None or whole.shape != owner.shape:
            return whole
        first = min(self.dist.rank * self._most_rows(len(owner)), len(owner))
        return whole[first : first + len(owner.to_local())]

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Returns the parameter's shape for whatever has that of this rank's share. Other states of
        an optimizer, such as counters, are not split.
        """
        owner = self._owner(name)
        return shape if owner is None or shape != owner.to_local().shape else owner.shape

    def whole(self, name: str, share: Tensor) -> tuple[Tensor, int]:
        """Gathers the shares of all ranks, of which the last ones may be shorter."""
        owner = self._owner(name)
        if owner is None or share.shape != owner.to_local().shape:
            return share, 0
        length = len(owner)
        rows = self._most_rows(length)
        padded = share.new_zeros(rows, *share.shape[1:])
        padded[: len(share)] = share
        return torch.cat(self.dist.all_gather(padded))[:length], rows * self.dist.rank

    def _owner(self, name: str) -> Any:
        """Returns the parameter whose name is a part of this one; None if there is none."""
        return next((self._split[part] for part in name.split("/") if part in self._split), None)

    def _most_rows(self, length: int) -> int:
        """Returns how many rows of so many a rank holds; the last ranks may hold fewer."""
        return -(-length // self.dist.world_size)

    def sum_gradients(self) -> None:
        """Gives each share its gradient, which FSDP has summed."""
        for name, share in self.parameters.items():
            grad = self._split[name].grad
            share.grad = torch.zeros_like(share) if grad is None else grad.to_local()

    def total_norm(self, norms: Iterable[Tensor]) -> Tensor:
        norm = super().total_norm(norms)
        square = norm.double().square()
        with self.dist.waiting():
            self.dist.all_reduce(square)
        return square.sqrt().to(norm.dtype)

    def _route_calls(self, objective: Any) -> None:
        """Makes calls of the objective go through the outer unit, whose hooks gather weights."""
        forward, statistics = objective.forward, self._through_root(objective.statistics)
        has_statistics = True  # until the first batch has none; then no batch has any

        def routed_forward(*arguments: Any) -> Any:
            return with_loss(*self._root(loss_and_output, forward, *arguments))

        def routed_statistics(*arguments: Any) -> dict[str, Tensor]:
            nonlocal has_statistics
            result = statistics(*arguments) if has_statistics else {}  # which gathers nothing
            has_statistics = bool(result)
            return result

        objective.forward, objective.statistics = routed_forward, routed_statistics
        objective.predict = self._through_root(objective.predict)
        objective.evaluators = self._through_root(objective.evaluators)  # some read weights

    def _through_root(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that makes this call through the outer unit, and then releases the
        weights, as no backward pass will.
        """

        def routed(*arguments: Any) -> Any:
            with self.dist.waiting():
                result = self._root(call, *arguments)
            for unit in self._units:
                unit.reshard()
            return result

        return routed
