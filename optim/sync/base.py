"""The contract of everything that keeps ranks in step: who adds up gradients, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from utils.checkpoint.slices import Rows
from utils.ranks.distributed import Dist
from utils.ranks.notices import NONE, Notices


@dataclass(frozen=True)
class Verdict:
    """The result of a reduction, the same on all ranks."""

    weight: float  # the global loss weight that gradients were divided by
    finite: bool  # False: the step must not be taken
    ranks: list[int]  # whose own gradients (dense or checked) or weight were not finite
    parameter: str | None  # the first one, in the net's order, whose summed gradient is not finite
    notices: Notices = NONE  # summed over ranks

    @property
    def problem(self) -> str:
        """For people: what is not finite, and whose fault it is."""
        whose = ", ".join(map(str, self.ranks)) or "none alone (the sum overflowed)"
        return (
            f"the gradient is not finite, first seen in {self.parameter or 'a sparse table'} and on"
            f" rank {whose}"
        )


class Sync(Protocol):
    """One step is `zero`, `sums`, then `backward` around each micro-batch, `finish`, and perhaps
    `clip`.

    Every rank calls all of them in this order. A configuration names a builder in this package,
    which gets its keys; `wrap` follows.
    """

    # The choice of `sync=` that builds it. A class that `_target_` names writes both as literals:
    # the configuration is checked before anything is imported.
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
        """Start a step: no gradients yet, wherever old ones were."""
        ...

    def sums(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Statistics of this rank's micro-batches, summed over them and over all ranks; free when
        there are none.
        """
        ...

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and the backward of one micro-batch; `last` says that no other follows
        in this step.
        """
        ...

    def finish(
        self,
        weights: Sequence[Tensor | float],
        checked: Sequence[Tensor] = (),
        notices: Notices = NONE,
        late: bool = False,
    ) -> Callable[[], Verdict]:
        """Gradients become global sums over the global weight. What is returned waits for the
        device, and tells how it went.

        Args:
            weights: what each micro-batch of this rank counts for.
            checked: more of this rank's gradients that must be finite, such as table rows.
            notices: what this rank tells all others, to be summed over ranks as well.
            late: the verdict is read once the next step has begun, which overwrites the gradients.
        """
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; the norm before, still on the
        device.
        """
        ...

    def rows(self, name: str, ndim: int) -> Rows | None:
        """Which rows this rank holds of what a checkpoint has whole: of a parameter, an average or
        an optimizer's memory, by its name there. None: all of it, as every rank does.
        """
        ...

    def take_wait_s(self) -> float:
        """Seconds spent waiting for other ranks' gradients since the last reading."""
        ...
