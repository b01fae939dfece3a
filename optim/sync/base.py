"""The base of all syncs: what ranks tell each other in a step.

They sum gradients, and by one small message more they share the weights of their losses, whether
all gradients are finite, and whether any rank asks to stop or to save.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from contract import StepOut
from utils.errors import RunError
from utils.ranks.distributed import Dist
from utils.ranks.one_by_one import OneByOne
from utils.transfer import local, to_device, wide

LAG = {"cuda": 1}  # steps after which a step's answers are read


class Sync:
    """Keeps ranks in step. This base assumes that every rank holds whole tensors; syncs that differ
    override methods.

    In each step, all ranks call `zero`, `sum_statistics`, `micro_batch` around each micro-batch,
    `finish`, `agree`, `check_finite` and `divide`, in this order.

    A configuration names a class or function of this package, which is called with its keys; then
    the run calls `wrap`.
    """

    splits_weights = False  # whether each rank keeps only a share of every parameter
    # from `wrap` on: what is optimised and averaged, whole or this rank's share of each
    parameters: dict[str, nn.Parameter]
    objective: nn.Module
    dist: Dist

    def wrap(self, objective: nn.Module, dist: Dist) -> None:
        """Prepares the objective for this sync. Called once, before any optimizer is built."""
        self.objective = objective
        self.parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        self.dist, self._waited = dist, Stopwatch(dist.device)
        # what `check_finite` has not read yet: a step, what was checked in it, the answers, blame
        self._unread = deque[tuple[int, list[str], Callable[[], list[float]], Callable[[], str]]]()
        self._requests: list[float] = []

    def forward(self, *arguments: Any) -> StepOut:
        """Calls the objective in training. All else calls the objective itself."""
        return self.objective(*arguments)

    def zero(self) -> None:
        """Begins a step: clears all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def sum_statistics(self, statistics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Sums an objective's statistics, given for each micro-batch, over these and over ranks.

        Communicates nothing if there are none.
        """
        # most objectives have none; all ranks know so without a message
        if not any(statistics):
            return {}
        like = statistics[0]
        names = sorted(like)
        rows = []  # all statistics of a micro-batch, in one tensor
        for named in statistics:
            assert sorted(named) == names, "names must be the same in every micro-batch"
            values = [named[name].detach() for name in names]
            rows.append(torch.cat([wide(value.to(self.dist.device)).flatten() for value in values]))
        # one message for all statistics, added in the order of gradients
        with self._waited.running():
            total = self.over_ranks(self.over_micro_batches(rows))
        pieces = total.split([like[name].numel() for name in names])
        return {
            name: piece.view_as(like[name]).to(like[name].dtype)
            for name, piece in zip(names, pieces, strict=True)
        }

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Returns a context for the forward and backward pass of one micro-batch.

        `last` says that it is the last one of the step.
        """
        return nullcontext()

    def finish(self) -> dict[str, Tensor]:
        """Sums gradients over ranks. Returns the norm of each sum, or of this rank's share of it,
        by the parameter's name. On CUDA the host does not wait.
        """
        with self.dist.waiting(), self._waited.running():
            self.sum_gradients()
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return dict(zip(grads, norms_of([*grads.values()]), strict=True))

    def agree(
        self,
        step: int,
        weights: Sequence[Tensor | float],
        norms: Mapping[str, Tensor],
        row_grads: list[Tensor],
        requests: Sequence[float],
        blame: Callable[[], str] = str,
    ) -> Tensor:
        """Tells all ranks what this one knows of the step, and returns the weight of the whole
        batch. `check_finite` reads the rest.

        Args:
            weights: those of the losses of this rank's micro-batches.
            norms: what `finish` returned.
            row_grads: gradients of table rows, of this rank alone.
            requests: to all ranks; they learn the sums.
            blame: called on all ranks if the step turns out not to be finite; names what of this
                rank's data is not, if anything.
        """
        device = self.dist.device
        rows = [torch.as_tensor(weight, dtype=torch.float32, device=device) for weight in weights]
        weight = self.over_micro_batches(rows).view(())
        of_rows = torch.stack([*norms_of(row_grads)]).sum() if row_grads else weight.new_zeros(())
        checked = torch.stack([weight, *norms.values(), of_rows])
        asked = weight.new_zeros(len(requests))
        if any(requests):  # numbers of the host are copied only if they say something
            asked = to_device(torch.tensor(requests, dtype=torch.float32), device)
        with self.dist.waiting():
            message = self.over_ranks(torch.cat([checked, asked]))
        names = ["the loss's weight", *norms, "a sparse table"]
        self._unread.append((step, names, _to_host(message), blame))
        return message[0]

    def check_finite(self, policy: str, newest: bool = False) -> str:
        """Reads whether the last steps were finite, on all ranks alike. Returns why the newest one
        must be skipped, or an empty string; with the `policy` raise, raises the error that ends the
        run instead.

        On CUDA, the host reads a step's answers during the next step, when a bad update has already
        been made. With raise that does no harm: the run ends, and the `newest` step is read as well
        before anything is logged, evaluated or saved. With skip the run goes on, so the host waits
        for the answers of each step.
        """
        late = policy == "raise" and not newest
        while len(self._unread) > (LAG.get(self.dist.device.type, 0) if late else 0):
            step, names, answers, blame = self._unread.popleft()
            with self.dist.waiting():
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
            if data := next(filter(None, self.dist.all_gather_text(blame())), ""):
                problem, remedy = f"{problem}, nor is the data ({data})", "mend the data"
            if policy == "raise":
                raise RunError(
                    f"on_nonfinite=raise: step {step}: {problem}; {remedy}, or use"
                    " on_nonfinite=skip"
                )
            return problem
        return ""

    @property
    def all_read(self) -> bool:
        """Whether the answers of every step so far have been read."""
        return not self._unread

    @property
    def has_requests(self) -> bool:
        """Whether any rank has asked for something since the last `take_requests`."""
        return any(self._requests)

    def take_requests(self) -> list[float]:
        """Returns the sums of what ranks asked for in the steps read since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def sum_gradients(self) -> None:
        """Sums gradients over ranks, unless that is done by now; a parameter without a gradient
        gets a zero.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def divide(
        self, weight: Tensor, norms: Iterable[Tensor] = (), max_norm: float | None = None
    ) -> None:
        """Divides gradients by the weight of the whole batch, then scales them to a norm of at most
        `max_norm` together; `norms` are what `finish` returned.

        By a weight that is 0 or not finite, it makes them 0. Gradients of table rows are not
        scaled: their optimizer uses only signs.
        """
        # one division for all gradients; a weight of 0 gives a factor of 0
        factor = wide(weight).reciprocal().nan_to_num(0.0, 0.0, 0.0)
        if max_norm is not None:
            norm = self.total_norm(norms) * factor
            factor *= (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch's clip_grad_norm_
        for grad in self.gradients():
            # in at least float32
            values = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad.copy_(values.mul_(factor.to(values.dtype)))  # copies nothing if they are `grad`

    def total_norm(self, norms: Iterable[Tensor]) -> Tensor:
        """Returns the norm of tensors that are laid out as `parameters`, over all ranks' shares,
        from the norm of each.

        All ranks call it together. The result stays on the device.
        """
        return torch.linalg.vector_norm(torch.stack([*norms]))

    @torch.no_grad()
    def norms_since(self, before: list[Tensor]) -> dict[str, Tensor]:
        """Returns the norms of the parameters, and of how far an update has moved them from their
        copies `before`, which it overwrites.
        """
        parameters = [p.detach() for p in self.parameters.values()]
        torch._foreach_sub_(before, parameters)
        measured = {"param_norm": parameters, "update_norm": before}
        return {name: self.total_norm(norms_of(tensors)) for name, tensors in measured.items()}

    def share_of(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor that a checkpoint holds whole: a parameter, an
        average, or an optimizer's state. Its name there contains the parameter's.
        """
        return whole

    def gathered(self, shares: Mapping[str, Tensor]) -> OneByOne:
        """Returns such tensors whole, one by one, from this rank's rows of each, which may be a
        DTensor.
        """
        shapes = {
            name: torch.empty(self.whole_shape(name, share.shape), dtype=share.dtype, device="meta")
            for name, share in shares.items()
        }
        return OneByOne(shapes, lambda name: self.whole(name, local(shares[name]))[0])

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Returns the shape of what `whole` returns."""
        return shape

    def whole(self, name: str, share: Tensor) -> tuple[Tensor, int]:
        """Returns all rows of such a tensor, of which `share` are this rank's, and the number of
        this rank's first row. All ranks call it together.
        """
        return share, 0

    def take_wait_s(self) -> float:
        """Returns the seconds spent, since the last call, waiting for gradients after the backward
        pass and for statistics.
        """
        return self._waited.read()

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, for dividing and clipping."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def over_micro_batches(self, rows: Sequence[Tensor]) -> Tensor:
        """Returns the sum of what this rank has for each of its micro-batches."""
        return torch.stack(list(rows)).sum(0)

    def over_ranks(self, tensor: Tensor) -> Tensor:
        """Returns the sum over ranks; may overwrite the tensor."""
        self.dist.all_reduce(tensor)
        return tensor


def norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Returns the norm of each tensor, on a GPU in one launch."""
    # at least float32, because sums of squares overflow in half precision
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    return torch._foreach_norm(tensors, 2, dtype) if tensors else ()


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


class Stopwatch:
    """Adds up time spent waiting; on CUDA by events, so that the host does not wait to measure."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose time is counted: the host's, or on CUDA the stream's."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((begin, end))

    def read(self) -> float:
        """Returns the seconds counted since the last call."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds, self._spans = self._seconds, 0.0, []
        return seconds
