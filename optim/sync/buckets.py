"""Flat buffers for gradients, so that many small tensors are sent as few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from utils.ranks.distributed import Dist

ALIGN = 16  # elements between which gradients start: vectorised kernels want aligned addresses


class Bucket:
    """The gradients of some parameters in one flat tensor. A tail of other numbers may follow."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        tail: int = 0,
    ) -> None:
        self.parameters = dict(parameters)
        size = sum(_padded(p.numel()) for p in self.parameters.values())
        self.flat = torch.zeros(size + tail, dtype=dtype, device=device)
        self.grads, self.tail = self.flat[:size], self.flat[size:]
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, p in self.parameters.items():
            self.views[name] = self.flat[start : start + p.numel()].view(p.shape)
            start += _padded(p.numel())
        self.magnitude = torch.zeros((), device=device)
        self.missing = set(self.parameters)
        self.sent = False
        self._work: c10d.Work | None = None

    def reset(self) -> None:
        """Begins a step: drops all gradients and marks each as missing."""
        self.missing = set(self.parameters)
        self.sent = False
        for p in self.parameters.values():
            p.grad = None

    def move_in(self, names: Iterable[str]) -> None:
        """Copies fresh gradients into the bucket; autograd then accumulates in the bucket itself.

        One copy takes less memory traffic than zeroing the bucket and adding to it.
        """
        outside = [
            (p, p.grad, view)
            for p, view in ((self.parameters[name], self.views[name]) for name in names)
            if p.grad is not view
        ]
        fresh = [(view, grad) for _, grad, view in outside if grad is not None]
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [grad for _, grad in fresh])
        for p, grad, view in outside:
            # a parameter without a gradient counts as zero
            p.grad = view if grad is not None else view.zero_()

    def close(self) -> None:
        """Completes the bucket, and records this rank's largest gradient: it tells later which rank
        made a sum that is not finite.
        """
        self.move_in(self.parameters)
        self.magnitude = magnitude(self.grads)

    def finite(self) -> Tensor:
        """Returns 1 for each finite gradient, else 0, in the order of `views`."""
        return finite([*self.views.values()]) if self.views else self.tail.new_zeros(0)

    def fill(self, grads: Tensor) -> None:
        """Sets the parameters' gradients from a flat tensor with the layout of `grads`."""
        self.grads.copy_(grads)
        for name, p in self.parameters.items():
            p.grad = self.views[name]

    def send(self, dist: Dist) -> None:
        """Starts the sum over ranks."""
        self._work = dist.all_reduce(self.flat, async_op=True)
        self.sent = True

    def wait(self) -> None:
        """Waits for the sums; on CUDA, makes the current stream wait."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def fill_buckets(
    parameters: Mapping[str, nn.Parameter], bucket_mb: float, tail: int, device: torch.device
) -> list[Bucket]:
    """Makes buckets in the order of the parameters, each with one dtype. The last one is float32
    and has the tail.
    """
    full: list[dict[str, nn.Parameter]] = []
    filling: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, p in parameters.items():
        bucket = filling.setdefault(p.dtype, {})
        if bucket and (_bytes(bucket) + p.numel() * p.element_size()) > bucket_mb * 2**20:
            full.append(bucket)
            bucket = filling[p.dtype] = {}
        bucket[name] = p
    last = filling.pop(torch.float32, {})
    buckets = [
        Bucket(bucket, next(iter(bucket.values())).dtype, device)
        for bucket in [*full, *filling.values()]
    ]
    return [*buckets, Bucket(last, torch.float32, device, tail)]


def magnitude(tensor: Tensor) -> Tensor:
    """Returns the largest absolute value as a fraction of the dtype's maximum.

    It is inf or NaN exactly if an element is. Unlike `isfinite().all()`, it takes one pass without
    a temporary, and it is a bound: if the ranks' fractions add up to less than 1, their sum cannot
    overflow.
    """
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).double().div(torch.finfo(tensor.dtype).max).float()


def finite(grads: Sequence[Tensor]) -> Tensor:
    """Returns 1 for each gradient that is finite or empty, else 0."""
    filled = [grad for grad in grads if grad.numel()]
    if filled and filled[0].device.type == "cpu":  # the norm below takes 13 times as long there
        bounds = torch.stack([bound for grad in filled for bound in torch.aminmax(grad)])
        largest = iter(bounds.view(-1, 2).abs().amax(1))
    else:
        # one launch on CUDA, and it keeps NaN
        largest = iter(torch._foreach_norm(filled, float("inf")) if filled else ())
    zero = filled[0].new_zeros(()) if filled else torch.zeros((), device=grads[0].device)
    norms = [next(largest) if grad.numel() else zero for grad in grads]
    return torch.stack(norms).isfinite().float()


def inverse_weight(weight: Tensor) -> Tensor:
    """Returns 1 / weight in float64, and 0 for a weight that is 0 or not finite."""
    return (1 / weight.double()).nan_to_num(0.0, 0.0, 0.0)


def scale(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place by a number on the device, in at least float32."""
    for grad in grads:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        grad.copy_(wide.mul_(factor.to(wide.dtype)))  # copies nothing if `wide` is `grad`


def _bytes(bucket: Mapping[str, nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in bucket.values())


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
