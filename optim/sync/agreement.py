"""What ranks tell each other once per step, in one small all-reduce: whether all gradients are
finite, and whether any rank asks to stop or to save.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from utils.errors import RunError
from utils.ranks.distributed import Dist
from utils.transfer import to_device

LAG = {"cuda": 1}  # steps after which the answers are read


class Agreement:
    """The answers of the last steps. All ranks read the same ones at the same points.

    On CUDA, the host reads a step's answers during the next step, when a bad update has already
    been made. With `on_nonfinite=raise` that does no harm: the run ends, and all answers are read
    before anything is logged, evaluated or saved. With `on_nonfinite=skip` the run goes on, so the
    host waits for the answers of each step.
    """

    def __init__(self, policy: str, dist: Dist) -> None:
        self.lag = LAG.get(dist.device.type, 0) if policy == "raise" else 0
        self._policy, self._dist = policy, dist
        self._unread: deque[tuple[int, list[str], Callable[[], list[float]]]] = deque()
        self._requests: list[float] = []

    @property
    def all_read(self) -> bool:
        """Whether the answers of every step so far have been read."""
        return not self._unread

    @property
    def has_requests(self) -> bool:
        """Whether any rank has asked for something since the last `take_requests`."""
        return any(self._requests)

    def ask(
        self,
        step: int,
        checked: Mapping[str, Tensor],
        of_this_rank: Iterable[Tensor],
        requests: Sequence[float],
    ) -> None:
        """Sends what this rank knows of the newest step. All ranks call it together.

        Args:
            checked: what must be finite by name, on all ranks alike or a share of each.
            of_this_rank: further tensors, of this rank alone: gradients of table rows.
            requests: to all ranks; they learn the sums.
        """
        rows = list(of_this_rank)
        flags = finite([*checked.values()])
        of_rows = finite(rows).amin(0, keepdim=True) if rows else flags.new_ones(1)
        bad = 1 - torch.cat([flags, of_rows])
        asked = torch.tensor(requests, dtype=torch.float32)
        # numbers of the host are copied only if they say something
        asked = to_device(asked, bad.device) if any(requests) else bad.new_zeros(len(requests))
        message = torch.cat([bad, asked])
        with self._dist.waiting():
            self._dist.all_reduce(message)
        self._unread.append((step, [*checked, "a sparse table"], _to_host(message)))

    def read(self, except_last: int = 0) -> str:
        """Reads the answers of all steps except the last few.

        Returns why the newest step must be skipped, or an empty string; with `on_nonfinite=raise`,
        raises the error that ends the run instead.
        """
        while len(self._unread) > except_last:
            step, names, answers = self._unread.popleft()
            with self._dist.waiting():
                sums = answers()
            asked = sums[len(names) :]
            before = self._requests or [0.0] * len(asked)
            self._requests = [a + b for a, b in zip(before, asked, strict=True)]
            bad = next((name for name, count in zip(names, sums, strict=False) if count), None)
            if bad is None:
                continue
            problem = f"the gradient is not finite, first seen in {bad}"
            if self._policy == "raise":
                raise RunError(
                    f"on_nonfinite=raise: step {step}: {problem}; lower lr, set grad_clip, or use"
                    " on_nonfinite=skip"
                )
            return problem
        return ""

    def take_requests(self) -> list[float]:
        """Returns the sums of what ranks asked for in the steps read since the last call."""
        requests, self._requests = self._requests, []
        return requests


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Returns 1 for each tensor that is finite or empty, else 0."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.ones(len(tensors), device=tensors[0].device)
    if filled[0].device.type == "cpu":  # the norm below takes 13 times as long there
        bounds = torch.stack([bound for tensor in filled for bound in torch.aminmax(tensor)])
        largest = iter(bounds.view(-1, 2).abs().amax(1))
    else:
        largest = iter(torch._foreach_norm(filled, float("inf")))  # one launch, and it keeps NaN
    zero = filled[0].new_zeros(())
    norms = [next(largest) if tensor.numel() else zero for tensor in tensors]
    return torch.stack(norms).isfinite().float()


def _to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Starts to copy a few numbers. Returns a function that waits for this copy alone, and returns
    the numbers.
    """
    copy = tensor.to("cpu", non_blocking=tensor.is_cuda, copy=True)  # into pinned memory
    if not tensor.is_cuda:
        return copy.tolist
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read
