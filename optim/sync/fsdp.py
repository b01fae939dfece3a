"""PyTorch's fully_shard (FSDP2): every rank keeps a share of each parameter, and has it whole only
while it is needed.

What is optimised, averaged and remembered are plain tensors, each a rank's share of a parameter:
optimizers meet no DTensor. A share is what `Tensor.chunk` gives along the first dimension, so it
may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from optim.replicas import check_same
from optim.sync.buckets import magnitude
from optim.sync.common import Common
from optim.sync.ddp import with_loss
from utils.errors import ConfigError
from utils.ranks import distributed
from utils.ranks.distributed import Dist


class FSDP(Common):
    """Every block of the net by itself, and the rest once around; every call of the objective that
    needs weights goes through that.
    """

    name = "fsdp"
    splits_weights = True

    def __init__(self, reshard_after_forward: bool = True) -> None:
        self._reshards = reshard_after_forward

    def wrap(self, objective: Any, dist: Dist) -> nn.Module:
        """The objective itself, whose calls find whole weights from now on; its parameters are
        split.
        """
        trained = [p for p in objective.parameters() if p.requires_grad]
        if len(kinds := {p.dtype for p in trained}) > 1 or any(p.ndim == 0 for p in trained):
            raise ConfigError(
                "sync=fsdp: splits parameters of one type with a dimension, and this net has"
                f" {kinds}; use sync=allreduce"
            )
        self._mesh = DeviceMesh.from_group(distributed.group(dist), dist.device.type)
        root = Calls(objective)
        frozen = {p for p in objective.parameters() if not p.requires_grad}
        for block in objective.shardable():
            fully_shard(
                block, mesh=self._mesh, reshard_after_forward=self._reshards, ignored_params=frozen
            )
        # What is around is needed again at once
        self._root: Any = fully_shard(
            root, mesh=self._mesh, reshard_after_forward=False, ignored_params=frozen
        )
        self._units: list[Any] = [
            module for module in root.modules() if isinstance(module, FSDPModule)
        ]
        for unit in self._units:
            unit.set_custom_reduce_scatter(Summing(self._note))
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # tied ones have several names
        self._split: dict[str, Any] = {
            name: p
            for name, p in objective.named_parameters(remove_duplicate=False)
            if p.requires_grad
        }
        shares = {
            name: nn.Parameter(p.to_local().detach())
            for name, p in objective.named_parameters()
            if p.requires_grad
        }
        self.begin(shares, dist)
        self._own_magnitude = torch.zeros((), device=dist.device)
        self._route(objective)
        return objective

    def zero(self) -> None:
        """Start a step."""
        super().zero()
        self._own_magnitude.zero_()
        for parameter in self._split.values():
            parameter.grad = None

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Gradients are summed whole on each rank until the last micro-batch; what stands around
        the blocks stays whole as well.
        """
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self._reshards)
        self._root.set_reshard_after_backward(last, recurse=False)
        with self.dist.waiting():  # every pass is full of messages
            yield

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0, fetched one by one; nothing on the others, which take part."""
        whole = {}
        for name, tensor in tensors.items():
            share = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts = (
                self.dist.gather(share.detach())
                if self._owner(name, tensor) is not None
                else [share]
            )
            if parts is not None and self.dist.is_main:
                whole[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the shapes that they have whole."""
        owners = {name: self._owner(name, tensor) for name, tensor in tensors.items()}
        return {
            name: (
                tensor
                if (owner := owners[name]) is None
                else torch.empty(owner.shape, dtype=tensor.dtype, device="meta")
            )
            for name, tensor in tensors.items()
        }

    def split(self, tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
        """This rank's shares, after a look whether all ranks have read the same."""
        check_same({f"{part}/{name}": tensor for name, tensor in tensors.items()}, self.dist)
        return {name: self._share(name, tensor) for name, tensor in tensors.items()}

    def _share(self, name: str, tensor: Tensor) -> Tensor:
        owner = self._owner(name, tensor)
        if owner is None:
            return tensor
        share = torch.zeros(owner.to_local().shape, dtype=tensor.dtype)
        start = self.dist.rank * -(-len(tensor) // self.dist.world_size)
        share.copy_(tensor[start : start + len(share)])
        share = share.to(self.dist.device)
        if name not in self._split:
            return share
        return DTensor.from_local(
            share,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _owner(self, name: str, tensor: Tensor) -> Any:
        """The parameter whose shares these are: weights have its name, averages and memories
        contain it; counters are no shares.
        """
        return (
            next((self._split[part] for part in name.split("/") if part in self._split), None)
            if tensor.ndim
            else None
        )

    def _collect(self) -> None:
        for name, share in self.parameters.items():
            grad = self._split[name].grad
            share.grad = torch.zeros_like(share) if grad is None else grad.to_local()
        # one rank alone sends nothing
        self.magnitudes = (
            [self._own_magnitude]
            if self.dist.world_size > 1
            else [magnitude(grad) for grad in self._grads()]
        )

    def _whole_norm(self, norm: Tensor) -> Tensor:
        square = norm.double().square()
        with self.dist.waiting():
            self.dist.all_reduce(square)
        return square.sqrt().to(norm.dtype)

    def _note(self, added: Tensor) -> None:
        torch.maximum(self._own_magnitude, magnitude(added), out=self._own_magnitude)

    def _route(self, objective: Any) -> None:
        """Have calls from outside go through what is sharded once around."""
        forward, predict, statistics, evaluators = (
            objective.forward,
            objective.predict,
            objective.statistics,
            objective.evaluators,
        )

        def loss_in_sight(*given: Any) -> tuple[Tensor, Any]:
            out = forward(*given)
            return out.loss, with_loss(out.loss.detach(), out)

        known: dict[str, bool] = {}

        def found(*given: Any) -> dict[str, Tensor]:
            if not known.get("empty"):  # for one batch, for all: then nothing need be fetched
                result = self._without_gradients(statistics, *given)
                known["empty"] = not result
                return result
            return {}

        objective.forward = lambda *given: with_loss(*self._root(loss_in_sight, *given))
        objective.predict = lambda batch: self._without_gradients(predict, batch)
        objective.statistics = found
        # some look at weights
        objective.evaluators = lambda row: self._without_gradients(evaluators, row)

    def _without_gradients(self, call: Callable[..., Any], *given: Any) -> Any:
        """No backward follows that would let the weights go."""
        with self.dist.waiting():
            result = self._root(call, *given)
        for unit in self._units:
            unit.reshard()
        return result


class Calls(nn.Module):
    """Calls of an objective as passes of one module, around which hooks stand."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)


class Summing:
    """A reduce-scatter that adds up, whatever it is asked for, and shows what this rank adds."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self._note = note
        # the newer name, without a warning, is there from PyTorch 2.13 on
        self._reduce = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what comes and goes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._note(input_tensor)
        return self._reduce(
            output_tensor, input_tensor, group=group, op=c10d.ReduceOp.SUM, async_op=async_op
        )
