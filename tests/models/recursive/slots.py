"""Consecutive steps of an objective whose slots carry on."""

from collections.abc import Sequence
from typing import Any

from contract import Batch, Context, Noise, Objective, StepOut


def steps(
    objective: Objective, batches: Sequence[Batch], shards: Sequence[int] = (0, 1)
) -> list[StepOut]:
    carry, outs = objective.initial_carry(batches[0]), []
    for step, batch in enumerate(batches):
        outs.append(objective(batch, carry, Context(0.0, Noise(3, step, list(shards)))))
        carry = outs[-1].carry
    return outs


def rows_of(batch: Batch, rows: Any) -> Batch:
    return {name: tensor[rows] for name, tensor in batch.items()}
