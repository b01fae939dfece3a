"""The search space for Optuna, in Hydra's syntax: `interval(1e-4,1e-2)`, `tag(log,…)`, `int(…)`,
`range(…)`, `a,b,c`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from utils.errors import ConfigError
from utils.sweep.jobs import key_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Space:
    """The keys that a sweep searches, and the overrides that all its jobs share."""

    distributions: Mapping[str, BaseDistribution]
    shared: Sequence[str]

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """Returns the overrides of one job. A choice is a text, as an override writes it."""
        return [
            *self.shared,
            *(
                f"{key}={values[key] if isinstance(values[key], str) else repr(values[key])}"
                for key in self.distributions
            ),
        ]

    def corner(self, end: int) -> list[str]:
        """Returns the overrides of a job with the first (0) or last (-1) of all values."""
        ends: dict[str, Any] = {}
        drawn: Mapping[str, Any] = self.distributions
        for key, distribution in drawn.items():
            if hasattr(distribution, "choices"):
                ends[key] = distribution.choices[end]
            else:
                ends[key] = (distribution.low, distribution.high)[end]
        return self.overrides(ends)

    @property
    def size(self) -> float:
        """How many different jobs there are."""
        size = 1.0
        drawn: Mapping[str, Any] = self.distributions
        for distribution in drawn.values():
            if hasattr(distribution, "choices"):
                size *= len(distribution.choices)
            elif not distribution.single():
                if not distribution.step:
                    return math.inf
                size *= round((distribution.high - distribution.low) / distribution.step) + 1
        return size

    def check_same(self, other: Mapping[str, BaseDistribution], where: str) -> None:
        """Refuses an earlier trial of the study that was drawn from another space."""
        for key in [*self.distributions, *other]:
            if other.get(key) != self.distributions.get(key):
                raise ConfigError(
                    f"{key}: the study in {where} draws from another range; give the former, or"
                    " another hydra.sweep.dir"
                )


def space_of(arguments: Sequence[str], loader: ConfigLoader) -> Space:
    """Parses the space from the command line."""
    distributions: dict[str, BaseDistribution] = {}
    shared: list[str] = []
    given: set[str] = set()
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(arguments)):
        key = override.get_key_element()
        if (bare_key := key_of(key)) in given and (
            override.is_sweep_override() or bare_key in map(key_of, distributions)
        ):
            raise ConfigError(
                f"{override.input_line}: {bare_key} is given twice, and Optuna draws one value for"
                " it; leave one out"
            )
        given.add(bare_key)
        if override.is_sweep_override():
            try:
                distributions[key] = _distribution(override)
            except ValueError as error:  # as Optuna words it
                raise ConfigError(
                    f"{override.input_line}: {' '.join(str(error).split())}"
                ) from None
        else:
            shared.append(str(override.input_line))
    if not distributions:
        raise ConfigError(
            "hydra/sweeper=optuna: no key to choose values for; give some, as"
            " 'lr=tag(log,interval(1e-4,1e-2))' seed=0,1"
        )
    return Space(distributions, shared)


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log=log)
        return FloatDistribution(value.start, value.end, log=log)
    if isinstance(value, RangeSweep) and not value.shuffle and value.step > 0:
        numbers: list[Any] = list(value.range())  # the end is not one of them
        if numbers and isinstance(numbers[0], int):
            return IntDistribution(numbers[0], numbers[-1], log=log, step=int(value.step))
        if numbers:
            return FloatDistribution(float(numbers[0]), float(numbers[-1]), step=float(value.step))
    return CategoricalDistribution(list(override.sweep_string_iterator()))
