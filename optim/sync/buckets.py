"""Flat buffers in which gradients live, so that many small tensors travel as few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from utils.ranks.distributed import Dist

ALIGN = 16  # elements between which gradients start: vectorised kernels want aligned addresses


class Bucket:
    """Some parameters' gradients in one flat tensor, perhaps with a tail of other numbers that
    travels along.
    """

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
        """Start a step: no gradients yet, and each is expected once more before the bucket may
        leave.
        """
        self.missing = set(self.parameters)
        self.sent = False
        for p in self.parameters.values():
            p.grad = None

    def move_in(self, names: Iterable[str]) -> None:
        """Bring gradients that autograd has made into their places; from then on it adds to them
        there.

        One copy is less memory traffic than the alternative, filling with zeros and adding to them.
        """
        outside = [
            (p, p.grad, view)
            for p, view in ((self.parameters[name], self.views[name]) for name in names)
            if p.grad is not view
        ]
        made = [(view, grad) for _, grad, view in outside if grad is not None]
        if made:
            torch._foreach_copy_([view for view, _ in made], [grad for _, grad in made])
        for p, grad, view in outside:
            # a gradient that nobody made is a zero
            p.grad = view if grad is not None else view.zero_()

    def close(self) -> None:
        """Nothing more will arrive. What is inside now tells whose fault a bad sum is."""
        self.move_in(self.parameters)
        self.magnitude = magnitude(self.grads)

    def finite(self) -> Tensor:
        """For every parameter, in the order of `views`, 1 if its gradient is finite and 0 if
        not.
        """
        return finite([*self.views.values()]) if self.views else self.tail.new_zeros(0)

    def fill(self, grads: Tensor) -> None:
        """Take finished gradients in, laid out as `grads` is, for the parameters to have."""
        self.grads.copy_(grads)
        for name, p in self.parameters.items():
            p.grad = self.views[name]

    def send(self, dist: Dist) -> None:
        """Start summing over ranks."""
        self._work = dist.all_reduce(self.flat, async_op=True)
        self.sent = True

    def wait(self) -> None:
        """Until the sums are here (on CUDA: until the stream will see them)."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def fill_buckets(
    parameters: Mapping[str, nn.Parameter], bucket_mb: float, tail: int, device: torch.device
) -> list[Bucket]:
    """Buckets in the order of the parameters, one dtype each, the last one of float32 and with the
    tail.
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
    """Largest absolute value as a share of what the dtype can hold: inf or NaN exactly if some
    element is.

    One pass without a temporary, unlike `isfinite().all()`, and a bound: sums of shares below 1
    cannot overflow.
    """
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).double().div(torch.finfo(tensor.dtype).max).float()


def finite(grads: Sequence[Tensor]) -> Tensor:
    """For every gradient 1 if it is finite, as an empty one is, and 0 if not."""
    some = [grad for grad in grads if grad.numel()]
    # on CUDA one launch, and it keeps NaN
    largest = torch._foreach_norm(some, float("inf")) if some else ()
    empty = largest[0].new_zeros(()) if largest else torch.zeros((), device=grads[0].device)
    by_place = iter(largest)
    return (
        torch.stack([next(by_place) if grad.numel() else empty for grad in grads])
        .isfinite()
        .float()
    )


def inverse_weight(weight: Tensor) -> Tensor:
    """Returns 1 / weight in float64, and 0 for a weight that is 0 or not finite."""
    return (1 / weight.double()).nan_to_num(0.0, 0.0, 0.0)


def scale(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply by a number that only the device knows; in half precision the number itself would
    lose too much.
    """
    for grad in grads:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        grad.copy_(wide.mul_(factor.to(wide.dtype)))  # nothing to copy where it was wide enough


def _bytes(bucket: Mapping[str, nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in bucket.values())


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
