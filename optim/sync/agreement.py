"""One small all-reduce in each step: ranks share the weights of their losses, whether all gradients
are finite, and whether any rank asks to stop or to save.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from optim.sync.base import Sync, norms_of
from utils.errors import RunError
from utils.transfer import to_device

Blame = Callable[[], str]  # names what of this rank's data is not finite, if anything
LAG = {"cuda": 1}  # steps after which the answers are read


class Agreement:
    """The answers of the last steps. All ranks read the same ones at the same points.

    On CUDA, the host reads a step's answers during the next step, when a bad update has already
    been made. With `on_nonfinite=raise` that does no harm: the run ends, and all answers are read
    before anything is logged, evaluated or saved. With `on_nonfinite=skip` the run goes on, so the
    host waits for the answers of each step.
    """

    def __init__(self, policy: str, sync: Sync) -> None:
        self.lag = LAG.get(sync.dist.device.type, 0) if policy == "raise" else 0
        self._policy, self._sync = policy, sync
        self._unread: deque[tuple[int, list[str], Callable[[], list[float]], Blame]] = deque()
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
        weights: Sequence[Tensor | float],
        norms: Mapping[str, Tensor],
        row_grads: list[Tensor],
        requests: Sequence[float],
        blame: Blame = str,
    ) -> Tensor:
        """Sends what this rank knows of the newest step. All ranks call it together.

        Args:
            weights: those of the losses of this rank's micro-batches.
            norms: of gradients by name, on all ranks alike or of a share of each.
            row_grads: gradients of table rows, of this rank alone.
            requests: to all ranks; they learn the sums.
            blame: called on all ranks if the step turns out not to be finite.

        Returns the weight of the whole batch.
        """
        device = self._sync.dist.device
        rows = [torch.as_tensor(weight, dtype=torch.float32, device=device) for weight in weights]
        weight = self._sync.over_micro_batches(rows).view(())
        of_rows = torch.stack([*norms_of(row_grads)]).sum() if row_grads else weight.new_zeros(())
        checked = torch.stack([weight, *norms.values(), of_rows])
        asked = weight.new_zeros(len(requests))
        if any(requests):  # numbers of the host are copied only if they say something
            asked = to_device(torch.tensor(requests, dtype=torch.float32), device)
        with self._sync.dist.waiting():
            message = self._sync.over_ranks(torch.cat([checked, asked]))
        names = ["the loss's weight", *norms, "a sparse table"]
        self._unread.append((step, names, _to_host(message), blame))
        return message[0]

    def read(self, except_last: int = 0) -> str:
        """Reads the answers of all steps except the last few.

        Returns why the newest step must be skipped, or an empty string; with `on_nonfinite=raise`,
        raises the error that ends the run instead.
        """
        while len(self._unread) > except_last:
            step, names, answers, blame = self._unread.popleft()
            with self._sync.dist.waiting():
                sums = answers()
            # requests add up until the run takes them
            asked = sums[len(names) :]
            before = self._requests or [0.0] * len(asked)
            self._requests = [a + b for a, b in zip(before, asked, strict=True)]
            if all(map(math.isfinite, sums)):
                continue
            # a sum over ranks is finite only if all that was added is
            checked = zip(names, sums, strict=False)
            bad = next(name for name, total in checked if not math.isfinite(total))
            problem = f"the gradient is not finite, first seen in {bad}"
            remedy = "lower lr, set grad_clip"
            if data := next(filter(None, self._sync.dist.all_gather_text(blame())), ""):
                problem, remedy = f"{problem}, nor is the data ({data})", "mend the data"
            if self._policy == "raise":
                raise RunError(
                    f"on_nonfinite=raise: step {step}: {problem}; {remedy}, or use"
                    " on_nonfinite=skip"
                )
            return problem
        return ""

    def take_requests(self) -> list[float]:
        """Returns the sums of what ranks asked for in the steps read since the last call."""
        requests, self._requests = self._requests, []
        return requests


def _to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Starts to copy a few numbers. Returns a function that waits for this copy alone, and returns
    the numbers.
    """
    if not tensor.is_cuda:
        return tensor.tolist
    copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read
