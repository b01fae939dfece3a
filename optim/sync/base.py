"""The contract of a sync, which sums gradients over ranks, and the verdicts on its sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.checkpoint.format import RowRange
from utils.errors import RunError
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, Notices

LAG = {"cuda": 1}  # steps after which a verdict is read


@dataclass(frozen=True)
class Verdict:
    """Whether a step's gradients are finite, and what came with them; the same on all ranks."""

    weight: float  # the global loss weight that gradients were divided by
    finite: bool  # if False, the weights must not be updated
    bad_ranks: list[int]  # ranks whose own gradients (dense or checked) or weight were not finite
    bad_parameter: str | None  # the first parameter whose summed gradient is not finite
    notices: Notices = NONE  # summed over ranks

    @property
    def problem(self) -> str:
        """Says which gradient is not finite, and on which ranks."""
        where = (
            f"the gradient is not finite, first seen in {self.bad_parameter or 'a sparse table'}"
        )
        if not self.bad_ranks:
            return f"{where}, in the sum over ranks alone, which overflowed"
        return f"{where} and on rank {', '.join(map(str, self.bad_ranks))}"


class Verdicts:
    """The verdicts on the last steps. All ranks read the same verdicts at the same points.

    On CUDA, the host reads a step's verdict during the next step, when a bad update has already
    been made. With `on_nonfinite=raise` that does no harm: the run ends, and every verdict is read
    before anything is logged, evaluated or saved. With `on_nonfinite=skip` the run goes on, so the
    host waits for each step's verdict.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.lag = LAG.get(device.type, 0) if policy == "raise" else 0
        self._policy = policy
        self._unread: deque[tuple[int, Callable[[], Verdict]]] = deque()
        self._notices = NONE

    @property
    def all_checked(self) -> bool:
        """Whether the verdict on every step so far has been read."""
        return not self._unread

    @property
    def has_notices(self) -> bool:
        """Whether any rank has sent a notice since the last `take_notices`."""
        return bool(self._notices)

    def add(self, step: int, read: Callable[[], Verdict]) -> None:
        """Adds the newest step; `read` waits for its verdict."""
        self._unread.append((step, read))

    def check(self, except_last: int = 0) -> str:
        """Reads the verdicts on all steps except the last few.

        Returns why the newest step must be skipped, or an empty string; with `on_nonfinite=raise`,
        raises the error that ends the run instead.
        """
        while len(self._unread) > except_last:
            step, read = self._unread.popleft()
            verdict = read()
            self._notices += verdict.notices
            if verdict.finite:
                continue
            if self._policy == "raise":
                raise RunError(
                    f"on_nonfinite=raise: step {step}: {verdict.problem}; lower lr, set grad_clip,"
                    " or use on_nonfinite=skip"
                )
            return verdict.problem
        return ""

    def take_notices(self) -> Notices:
        """Returns the notices that ranks sent with the steps checked since the last call."""
        notices, self._notices = self._notices, NONE
        return notices


class Sync(Protocol):
    """Keeps ranks in step.

    In each step, all ranks call `zero`, `sum_statistics`, `backward` around each micro-batch,
    `finish`, and `clip` if gradients are clipped, in this order.

    A configuration names a class or function of this package, which is called with its keys; then
    the run calls `wrap`.
    """

    # The choice of `sync=` that builds it. A class that `_target_` names writes it as a literal,
    # and `splits_weights` too if it is true: the configuration is checked before any import.
    name: str
    splits_weights: bool  # whether each rank keeps only a share of every parameter
    # from `wrap` on: what is optimised and averaged, whole or this rank's share of each
    parameters: dict[str, nn.Parameter]

    def wrap(self, objective: nn.Module, dist: Dist) -> nn.Module:
        """Prepares the objective for this sync and returns the module that training calls.

        Called once, before any optimizer is built. All else calls the objective itself.
        """
        ...

    def zero(self) -> None:
        """Begins a step: clears all gradients."""
        ...

    def sum_statistics(self, statistics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Sums an objective's statistics, given for each micro-batch, over these and over ranks.

        Communicates nothing if there are none.
        """
        ...

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Returns a context for the forward and backward pass of one micro-batch.

        `last` says that it is the last one of the step.
        """
        ...

    def finish(
        self,
        loss_weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Divides the gradients, summed over ranks, by the global weight.

        Returns a function that waits for the device and returns the verdict.

        Args:
            loss_weights: the loss weight of each micro-batch of this rank.
            checked: more of this rank's gradients that must be finite, such as table rows.
            notices: this rank's notices to all others, summed over ranks as well.
            late: the verdict is read once the next step has begun, which overwrites the gradients.
        """
        ...

    def clip(self, max_norm: float, names: Collection[str] | None = None) -> Tensor:
        """Scales dense gradients, all or those of these parameters, to a norm of at most `max_norm`
        together.

        Gradients of table rows are not scaled: their optimizer uses only signs. Returns the norm
        before scaling, still on the device.
        """
        ...

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the norm of tensors that are laid out as `parameters`, over all ranks' shares.

        All ranks call it together. The result stays on the device.
        """
        ...

    def row_range(self, name: str, ndim: int) -> RowRange | None:
        """Returns which rows of a tensor this rank holds, or None if every rank holds all of it.

        Called for parameters, averages and optimizer states, which a checkpoint stores whole;
        `name` is the tensor's name there.
        """
        ...

    def take_wait_s(self) -> float:
        """Returns the seconds spent waiting for other ranks' gradients since the last call."""
        ...
