"""Tries the objective of a new run before its first step, on a few rows: twice, and in halves.

docs/your-own-code.md shows each law with its line, and says what `utils/prove` finds beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contract import Batch, Context, Noise, Objective, StepOut
from models.objective import statistics_of, tables_of
from trial.batch import TriedBatch, check_metrics
from trial.generators import untouched
from utils.carries import flatten
from utils.errors import ConfigError, full_name, kind_of
from utils.transfer import wide

# how far the loss of a shard may be from the sum of its halves, as a share of their magnitudes
ROUNDING, HALF_PRECISION = 1e-3, 0.05
# the same of the norm of a gradient or a carry, and of a gradient that is nearly 0 beside others
NORM, NORM_IN_HALF, NEARLY_0 = 1e-3, 0.3, 1e-2
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
TRIED = 4  # rows of a shard: a trial of a large net must not take longer than its steps
MakeBatch = Callable[[Sequence[int]], tuple[Batch, Context]]


@dataclass(frozen=True)
class NoiseOfRows(Noise):
    """The random numbers that some rows of a batch get as part of the whole batch."""

    first: int = 0
    rows: int = 0
    whole: int = 0  # rows of the whole batch

    def _bits(self, stream: str, shape: Sequence[int], rows: Tensor | None = None) -> Tensor:
        if shape[0] % self.rows:  # drawn by shard, not by row
            return super()._bits(stream, shape, rows)
        each = shape[0] // self.rows
        whole, start = (each * self.whole, *shape[1:]), each * self.first
        if rows is not None:
            return super()._bits(stream, whole, rows + start)
        return super()._bits(stream, whole)[start : start + shape[0]]


def try_objective(objective: Objective, make_batch: MakeBatch, shards: int, owned: range) -> None:
    """Raises ConfigError for the first law that the objective breaks.

    Called on every rank before the first step of a new run. Each rank tries a few rows of a shard
    of its own. Changes nothing, but that the objective is in training mode from now on.
    """
    batch, ctx = make_batch(owned[:1])
    if len(next(iter(batch.values()))) == 1:  # cannot be halved
        if shards == 1:
            return
        batch, ctx = make_batch([owned[0], (owned[0] + 1) % shards])
    try:
        # compiling for halves of a shard would take longer than the trial
        with torch.compiler.set_stance("force_eager"):
            _try(objective, batch, ctx)
    finally:
        for table in tables_of(objective).values():
            table.take_row_grads()


def _try(objective: Objective, batch: Batch, ctx: Context) -> None:
    where = f"{full_name(objective)}.forward"
    objective.train()  # as it will train: parts that were built in evaluation mode included
    before, buffers = _prints(objective), dict(objective.named_buffers())
    rows = min(TRIED, len(next(iter(batch.values()))))
    slices = slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows)
    parts = [_rows_of(batch, ctx, each, where) for each in slices]
    instead = "ctx.noise, dropout from contract.Dropout; set that of a pretrained net to 0"
    with untouched(where, instead, ctx.noise.device):
        with torch.no_grad():
            totals, *of_halves = (_statistics(objective, part) for part in parts)
        for name, value in totals.items():
            what = f"{full_name(objective)}.statistics: {name}"
            halves = [half[name] for half in of_halves]
            if value.shape != halves[0].shape:
                raise ConfigError(
                    f"{what} has shape {list(value.shape)} for {rows} rows, but"
                    f" {list(halves[0].shape)} for half of them; return a sum over rows, or give"
                    " trial=false if every row has its own place in it"
                )
            _check_sum(what, value, halves)
        again = _forward(objective, parts[0], totals)
        outs, gradients = [], []
        for part in parts:
            outs.append(_forward(objective, part, totals))
            gradients.append(_gradients(objective, outs[-1].loss))
    after = _prints(objective)
    for name, seen in before.items():
        if after.get(name) != seen:
            if name in buffers:
                instead = "keep such state in the carry"
                if name.endswith("_u"):  # of a power iteration, which no example has a part in
                    instead = "for spectral_norm, divide by torch.linalg.matrix_norm(weight, 2)"
                raise ConfigError(
                    f"{where}: changes the buffer {name}, which each rank would change by its own"
                    f" shards; {instead}"
                )
            raise ConfigError(
                f"{where}: changes the parameter {name}, which each rank would change by its own"
                " shards; leave that to an optimizer, whose step all ranks take alike"
            )
    _check_repeats(where, outs[0], again)
    in_half = objective.dtype in (torch.bfloat16, torch.float16)
    rounding, of_norm = (HALF_PRECISION, NORM_IN_HALF) if in_half else (ROUNDING, NORM)
    for what in ("loss", "weight"):
        whole, *in_halves = (torch.as_tensor(getattr(out, what)).detach() for out in outs)
        _check_sum(f"{where}: the {what}", whole, in_halves, rounding)
    _check_gradients(where, gradients, of_norm)
    _check_carries(where, outs, of_norm)


def _gradients(objective: Objective, loss: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of all parameters, none if ranks split them."""
    parameters = dict(objective.named_parameters())
    if any(hasattr(parameter, "to_local") for parameter in parameters.values()):
        return {}
    loss.backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    objective.zero_grad(set_to_none=True)
    return gradients


def _check_gradients(where: str, gradients: Sequence[Mapping[str, Tensor]], share: float) -> None:
    """Refuses a gradient that is not the sum of those of the halves: hooks see whole batches."""
    whole, *halves = gradients
    gaps, sizes = dict[str, float](), dict[str, float]()
    for name, gradient in whole.items():
        of_halves = [half.get(name, torch.zeros_like(gradient)) for half in halves]
        gaps[name] = float(wide(gradient - of_halves[0] - of_halves[1]).norm())
        sizes[name] = sum(float(wide(each).norm()) for each in (gradient, *of_halves)) / 2
    largest = max(sizes.values(), default=0.0)
    for name, gap in gaps.items():
        if gap > share * max(sizes[name], NEARLY_0 * largest):  # NaN is for `on_nonfinite` to judge
            raise ConfigError(
                f"{where}: the gradient of {name} over a shard is not the sum over its two halves;"
                " let no hook, norm or clipping in the net see the rows of a batch together"
            )


def _check_carries(where: str, outs: Sequence[StepOut], share: float) -> None:
    """Refuses a carry in which a row's part depends on the other rows."""
    whole, *halves = (flatten(out.carry) for out in outs)
    for name, tensor in whole.items():
        of_halves = [half[name] for half in halves if name in half]
        if tensor.ndim == 0 or sum(len(half) for half in of_halves) != len(tensor):
            raise ConfigError(
                f"{where}: carry {name} has shape {[*tensor.shape]}, but its first dimension must"
                " be the example, with the same names for every batch"
            )
        gap = (wide(tensor) - wide(torch.cat(of_halves))).norm()
        if gap > share * wide(tensor).norm():
            raise ConfigError(
                f"{where}: carry {name} of a row depends on the other rows of the batch; compute"
                " it from the row alone"
            )


def _prints(objective: Objective) -> dict[str, tuple[int, int]]:
    """Returns for each parameter and buffer what changes whenever its content does.

    Leaves out what ranks split, as it is gathered in a pass.
    """
    prints = {}
    for name, tensor in (*objective.named_parameters(), *objective.named_buffers()):
        if not hasattr(tensor, "to_local"):
            bits = tensor.detach().flatten().view(WORDS.get(tensor.element_size(), torch.uint8))
            prints[name] = tensor._version, int(bits.sum(dtype=torch.int64))
    return prints


def _check_repeats(where: str, one: StepOut, other: StepOut) -> None:
    """Refuses a pass that gives something else the second time."""
    first, second = (_results(where, out) for out in (one, other))
    exact = torch.are_deterministic_algorithms_enabled() or not one.loss.is_cuda
    for name, value in first.items():
        there = second.get(name)
        if there is None or not _are_equal(value, there, exact):
            raise ConfigError(
                f"{where}: {name} of the same batch differs between two passes; keep no counter,"
                " cache or generator in the net: draw from ctx.noise, and keep state in the carry"
            )


def _are_equal(one: Tensor, other: Tensor, exact: bool) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if exact:  # NaN equals NaN
        bits = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
        return torch.equal(*bits)
    return torch.allclose(one, other, HALF_PRECISION, equal_nan=True)


def _results(where: str, out: StepOut) -> dict[str, Tensor]:
    named = {"the loss": out.loss, "the weight": torch.as_tensor(out.weight)}
    named |= {f"metric {name}": torch.as_tensor(pair[0]) for name, pair in out.metrics.items()}
    try:
        named |= {f"carry {name}": tensor for name, tensor in flatten(out.carry).items()}
    except TypeError as error:
        raise ConfigError(f"{where}: the carry: {error}") from None
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def _rows_of(batch: Batch, ctx: Context, rows: slice, reader: str) -> tuple[Batch, Context]:
    whole, noise = len(next(iter(batch.values()))), ctx.noise
    part = NoiseOfRows(
        noise.seed, noise.step, noise.shards, noise.device,
        first=rows.start, rows=rows.stop - rows.start, whole=whole,
    )  # fmt: skip
    some = {name: value[rows] for name, value in batch.items()}
    tried = TriedBatch(some, "a training batch", reader, "train_batch")
    return tried, replace(ctx, noise=part)


def _statistics(objective: Objective, part: tuple[Batch, Context]) -> dict[str, Tensor]:
    batch, ctx = part
    return statistics_of(objective, batch, objective.initial_carry(batch), ctx)


def _forward(
    objective: Objective, part: tuple[Batch, Context], totals: Mapping[str, Tensor]
) -> StepOut:
    batch, ctx = part
    carry = objective.initial_carry(batch)
    out = objective(batch, carry, replace(ctx, totals=totals))
    where = f"{full_name(objective)}.forward"
    if not isinstance(out, StepOut):
        raise ConfigError(f"{where}: returns {kind_of(out)}; return a StepOut")
    if not isinstance(out.loss, Tensor) or out.loss.numel() != 1:
        raise ConfigError(f"{where}: the loss is {kind_of(out.loss)}; return the sum, one number")
    if not out.loss.requires_grad:
        raise ConfigError(
            f"{where}: the loss has no gradient; compute it from the net's outputs, with neither"
            " detach() nor no_grad()"
        )
    check_metrics(where, out.metrics)
    return out


def _check_sum(what: str, whole: Tensor, parts: Sequence[Tensor], share: float = ROUNDING) -> None:
    """Refuses a value that is not the sum of its parts, but for rounding."""
    total = torch.stack([wide(part) for part in parts]).sum(0)
    magnitude = torch.stack([wide(part).abs() for part in parts]).sum(0)
    gap = (wide(whole) - total).abs()
    if bool((gap > share * magnitude + 1e-12).any()):  # NaN is for `on_nonfinite` to judge
        worst = int(gap.flatten().argmax())
        here, there = (float(value.flatten()[worst]) for value in (whole, total))
        if math.isfinite(here) and math.isfinite(there):
            raise ConfigError(
                f"{what} of a shard is {here:.6g}, but {there:.6g} over its two halves; return the"
                " sum over examples, neither a mean nor what depends on the other rows of a batch"
            )
