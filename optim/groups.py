"""Builds optimizers: ordered patterns assign every parameter to exactly one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from optim.muon import Muon, Whole
from optim.sparse_signsgd import SparseSignSGD, Table
from utils.command.instantiate import make
from utils.errors import ConfigError
from utils.ranks.distributed import Dist


def build_dense(
    config: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    whole: Whole | None = None,
) -> list[torch.optim.Optimizer]:
    """Builds one optimizer per entry of `optim.dense`, for the parameters its pattern claims.

    `whole` gathers matrices of which ranks hold shares, for optimizers that need them whole.
    """
    optimizers = []
    for number, (entry, names) in enumerate(claimed(config, parameters)):
        key = f"optim.dense[{number}].optimizer"
        named = {name: parameters[name] for name in names}
        made = make(entry["optimizer"], key, [*named.items()])
        _check_takes_all(key, made, named)
        if isinstance(made, Muon) and whole is not None:  # rows of a matrix are not enough for it
            made.whole = whole
        optimizers.append(_with_base_lr(made, key))
    return optimizers


def claimed(
    entries: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Returns each entry of `optim.dense` with the parameters that its pattern claims: it is the
    first one that matches their whole names.
    """
    patterns = [_pattern_of(number, entry["match"]) for number, entry in enumerate(entries)]
    claims: list[list[str]] = [[] for _ in entries]
    names = list(names)
    for name in names:
        matching = (number for number, pattern in enumerate(patterns) if pattern.fullmatch(name))
        first = next(matching, None)
        if first is None:
            raise ConfigError(
                f"optim.dense: no pattern matches parameter {name}; add an entry, for example"
                " match: '.*' as the last one"
            )
        claims[first].append(name)
    for number, (pattern, claim) in enumerate(zip(patterns, claims, strict=True)):
        if not claim:
            why = f"matches no parameter; names look like {names[:1]}"
            if any(pattern.fullmatch(name) for name in names):
                why = "earlier patterns claim all it matches; move it up"
            raise ConfigError(f"optim.dense[{number}].match={pattern.pattern}: {why} or remove it")
    return list(zip(entries, claims, strict=True))


def _pattern_of(number: int, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"optim.dense[{number}].match={pattern}: not a regular expression ({error}); correct it"
        ) from None


def _check_takes_all(key: str, made: Any, named: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError unless this is an optimizer of all these parameters."""
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{key}: makes a {type(made).__name__}; make a torch.optim.Optimizer")
    # an optimizer that takes only some kinds of parameters would silently leave out the others
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if left := [name for name, parameter in named.items() if id(parameter) not in taken]:
        raise ConfigError(
            f"{key}: {type(made).__name__} leaves out {left[0]}, which would never train; give it"
            " to the optimizer, or to another pattern"
        )


def build_sparse(
    config: Mapping[str, Any] | None,
    tables: Mapping[str, Table],
    capacity: int,
    dist: Dist,
) -> list[SparseSignSGD]:
    """Builds the optimizer of the sparse tables, if the net has any."""
    if not tables:
        return []
    optimizer = make(config, "optim.sparse", tables, capacity, dist)
    return [_with_base_lr(optimizer, "optim.sparse")]


def _with_base_lr(optimizer: Any, key: str) -> Any:
    """Keeps the initial rate, which schedules scale, in each group."""
    for group in optimizer.param_groups:
        if group.get("lr") is None:
            raise ConfigError(f"{key}: has no lr, which a schedule scales; give it a number")
        group["base_lr"] = float(group["lr"])
    return optimizer
