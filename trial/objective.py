"""Tries the objective of a new run before its first step, on a few rows of two shards: together,
again, and one by one.

docs/your-own-code.md shows each law with its line, and what only `utils/prove` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from contract import Batch, Context, Objective, StepOut
from models.objective import statistics_of, tables_of
from trial.batch import TriedBatch, check_metrics
from trial.generators import untouched
from utils.carries import flatten
from utils.errors import ConfigError, full_name, kind_of
from utils.transfer import wide

# how far the loss of two shards may be from their sum one by one, as a share of their magnitudes
ROUNDING, HALF_PRECISION = 1e-3, 0.05
# the same of the norm of a gradient or a carry, and of a gradient that is nearly 0 beside others
NORM, NORM_IN_HALF, NEARLY_0 = 1e-3, 0.3, 1e-2
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
TRIED = 2  # rows of each shard: a trial of a large net must not take longer than its steps
Part = tuple[Batch, Context]  # what the first step would see of some shards


def try_objective(
    objective: Objective, make_batch: Callable[[Sequence[int]], Part], shards: int, owned: range
) -> None:
    """Raises ConfigError for the first law that the objective breaks.

    Called on every rank before the first step of a new run. Each rank tries a few rows of one of
    its shards and of the next shard. Changes nothing but the objective's mode, which is training
    from now on.
    """
    tried = [owned[0], (owned[0] + 1) % shards][:shards]
    batch, ctx = make_batch(tried)
    rows = {name: value.unflatten(0, (len(tried), -1))[:, :TRIED] for name, value in batch.items()}
    parts = [_part(objective, rows, ctx, slice(0, len(tried)))]
    if len(tried) == 2:  # a single shard is never seen in parts
        parts += [_part(objective, rows, ctx, slice(i, i + 1)) for i in range(2)]
    try:
        # compiling for parts of a batch would take longer than the trial
        with torch.compiler.set_stance("force_eager"):
            _try(objective, parts)
    finally:
        for table in tables_of(objective).values():
            table.take_row_grads()


def _try(objective: Objective, parts: Sequence[Part]) -> None:
    """Tries two shards together, the first of the parts, and one by one, the others if any."""
    where, device = f"{full_name(objective)}.forward", parts[0][1].noise.device
    objective.train()  # as it will train: parts that were built in evaluation mode included
    before, buffers = _prints(objective), dict(objective.named_buffers())
    instead = "ctx.noise, dropout from contract.Dropout; set that of a pretrained net to 0"
    with untouched(where, instead, device):
        with torch.no_grad():
            totals, *of_each = (_statistics(objective, part) for part in parts)
        _check_statistics(f"{full_name(objective)}.statistics", totals, of_each)
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
                if name.endswith("_u"):  # of a power iteration, to which no example contributes
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
    if len(parts) == 1:
        return
    in_half = objective.dtype in (torch.bfloat16, torch.float16)
    rounding, of_norm = (HALF_PRECISION, NORM_IN_HALF) if in_half else (ROUNDING, NORM)
    for what in ("loss", "weight"):
        whole, *of_shards = (torch.as_tensor(getattr(out, what)).detach() for out in outs)
        _check_sum(f"{where}: the {what}", whole, of_shards, rounding)
    _check_gradients(where, gradients, of_norm)
    _check_carries(where, outs, of_norm)


def _check_statistics(
    where: str, totals: Mapping[str, Tensor], of_each: Sequence[Mapping[str, Tensor]]
) -> None:
    for name, value in totals.items():
        sums = [of_one[name] for of_one in of_each]
        if any(value.shape != of_one.shape for of_one in sums):
            raise ConfigError(
                f"{where}: {name} has shape {list(value.shape)} for two shards, but"
                f" {list(sums[0].shape)} for one; return a sum over rows, or put the rows of each"
                " shard of ctx.noise.shards in a separate place"
            )
        if sums:
            _check_sum(f"{where}: {name}", value, sums)


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
    """Refuses a gradient that is not the sum of those of the shards: hooks see whole batches."""
    whole, *of_each = gradients
    gaps, sizes = dict[str, float](), dict[str, float]()
    for name, gradient in whole.items():
        one, other = (of_one.get(name, torch.zeros_like(gradient)) for of_one in of_each)
        gaps[name] = float(wide(gradient - one - other).norm())
        sizes[name] = sum(float(wide(each).norm()) for each in (gradient, one, other)) / 2
    largest = max(sizes.values(), default=0.0)
    for name, gap in gaps.items():
        if gap > share * max(sizes[name], NEARLY_0 * largest):  # NaN is for `on_nonfinite` to judge
            raise ConfigError(
                f"{where}: the gradient of {name} over two shards is not the sum over each; let no"
                " hook, norm or clipping in the net see the rows of a batch together"
            )


def _check_carries(where: str, outs: Sequence[StepOut], share: float) -> None:
    """Refuses a carry in which a row's part depends on the other rows."""
    whole, *of_each = (flatten(out.carry) for out in outs)
    for name, tensor in whole.items():
        parts = [carry[name] for carry in of_each if name in carry]
        if tensor.ndim == 0 or sum(len(part) for part in parts) != len(tensor):
            raise ConfigError(
                f"{where}: carry {name} has shape {[*tensor.shape]}, but its first dimension must"
                " be the example, with the same names for every batch"
            )
        gap = (wide(tensor) - wide(torch.cat(parts))).norm()
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


def _part(objective: Objective, by_shard: Batch, ctx: Context, shards: slice) -> Part:
    """Returns the rows of some shards, with their random numbers."""
    some = {name: value[shards].flatten(0, 1) for name, value in by_shard.items()}
    reader = f"{full_name(objective)}.forward"
    batch = TriedBatch(some, "a training batch", reader, "train_batch")
    return batch, replace(ctx, noise=replace(ctx.noise, shards=ctx.noise.shards[shards]))


def _statistics(objective: Objective, part: Part) -> dict[str, Tensor]:
    batch, ctx = part
    return statistics_of(objective, batch, objective.initial_carry(batch), ctx)


def _forward(objective: Objective, part: Part, totals: Mapping[str, Tensor]) -> StepOut:
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
                f"{what} of two shards is {here:.6g} together, but {there:.6g} one by one; return"
                " the sum over examples, neither a mean nor what depends on the rows of other"
                " shards"
            )
