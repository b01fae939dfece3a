"""Tasks of the package reasoning-gym: distinct instances, and the share of answers that the
generators' own scorers accept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from contract import Batch, Prediction, Report
from utils.errors import ConfigError, brief
from utils.files import read_json
from utils.measure.metrics import format_metrics

T = TypeVar("T")
FILE = "gym.json"
TRIED = 50  # instances of which at least one must fit

Entry = dict[str, Any]  # an instance: question, answer and metadata
Place = tuple[str, int, str]  # of an instance: its generator, its index there, and a short hash


@dataclass(frozen=True)
class About:
    """Where the instances of a dataset come from: enough to make them again."""

    settings: dict[str, JsonValue]  # of the generators
    places: dict[str, list[Place]]  # of the examples of each split but the training split
    symbols: list[str]  # what the numbers in grids stand for


ABOUT = TypeAdapter(About)


def open_generator(name: str, settings: Mapping[str, JsonValue]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"--gym {name}: {brief(error)}") from None


def accepts(generator: Any, answer: str, entry: Entry) -> bool:
    try:
        return generator.score_answer(answer, entry) == 1
    except Exception:  # what a net writes may be anything, and some scorers parse it
        return False


def written(grid: Sequence[Sequence[str]]) -> str:
    """Writes a grid as the generators do."""
    return "\n".join(map(" ".join, grid))


def code_of(entry: Entry) -> str:
    return hashlib.sha256(entry["question"].encode()).hexdigest()[:12]


# ---- building ----


def add_options(options: argparse.ArgumentParser, source: Any) -> None:
    """Adds the options of builders; `source` takes the one that names generators."""
    source.add_argument("--gym", metavar="NAME[,NAME]", help="generators of reasoning-gym")
    options.add_argument(
        "--set", type=json.loads, default={}, help='their settings, such as {"min_empty": 20}'
    )


def draw(
    options: argparse.Namespace,
    counts: Mapping[str, int],
    wanted: str,
    read: Callable[[Any, Entry], tuple[str, T] | None],
) -> tuple[dict[str, JsonValue], dict[str, list[tuple[Place, T]]]]:
    """Returns the generators' settings, and instances with their places.

    Draws so many instances for each split, in turn from each generator. `read` returns what
    differs between any two instances and what is kept, or None if an instance is not `wanted`.
    """
    size = 4 * sum(counts.values()) + TRIED
    settings: dict[str, JsonValue] = {"seed": options.seed, "size": size, **options.set}

    def instances(name: str) -> Iterator[tuple[Place, T]]:
        generator, seen = open_generator(name, settings), set[str]()
        for index in range(size):
            entry = generator[index]
            if (found := read(generator, entry)) and found[0] not in seen:
                seen.add(found[0])
                yield (name, index, code_of(entry)), found[1]
            if not seen and index == TRIED:
                raise ConfigError(f"--gym {name}: its instances lack {wanted}; name another")
        raise ConfigError(
            f"--gym {name}: {len(seen):,} of {size:,} instances differ and have {wanted}; ask for"
            " fewer"
        )

    # those to evaluate on come first, so that they stay the same when more are trained on
    turns = cycle([instances(name) for name in dict.fromkeys(options.gym.split(","))])
    splits = sorted(counts, key="train".__eq__)
    return settings, {split: [next(next(turns)) for _ in range(counts[split])] for split in splits}


# ---- evaluations ----


class Gym:
    """The instances that a set of a dataset was made from."""

    def __init__(self, file: Path, split: str) -> None:
        about = read_json(file, ABOUT, "build the dataset again")
        self._file, self._places, self.symbols = file, about.places[split], about.symbols
        names = {name for name, _, _ in self._places}
        self._generators = {name: open_generator(name, about.settings) for name in names}
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._places)

    def entry(self, index: int) -> Entry:
        """Returns the instance of an example, which is made once for all evaluations."""
        name, place, code = self._places[index]
        if index not in self._entries:
            self._entries[index] = self._generators[name][place]
        if code_of(self._entries[index]) != code:
            raise ConfigError(
                f"{self._file}: {name} now asks another question in place {place}; build the"
                " dataset again, with another generator if that does not help"
            )
        return self._entries[index]

    def accepts(self, index: int, answer: str) -> bool:
        """True if the generator of an example accepts the answer."""
        return accepts(self._generators[self._places[index][0]], answer, self.entry(index))


class Accepted:
    """The share of answers that the generators' own scorers accept, as several may be right."""

    scalars = ("accepted",)

    def __init__(self, gym: Gym, output: str, text: Callable[[np.ndarray], str]) -> None:
        """`text` writes an answer, which the objective gives as this output."""
        self._gym, self._output, self._text = gym, output, text
        self._found: list[bool] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if self._output in prediction.outputs:
            answers = prediction.outputs[self._output][: len(indices)].cpu().numpy()
            texts = map(self._text, answers)
            self._found += map(self._gym.accepts, indices.tolist(), texts)

    def rows(self) -> dict[str, Tensor]:
        return {"accepted": torch.tensor(self._found)} if self._found else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        metrics = {name: float(found.double().mean()) for name, found in rows.items()}
        return Report(metrics, line=format_metrics(metrics))
