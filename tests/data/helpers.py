"""Reading sources whole, and writing what builders and sources read."""

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contract import Arrays, Evaluator, Examples, Prediction, Report, Source

Damage = Callable[[Path], object]  # of a folder


def joined(batches: Iterable[Arrays]) -> Arrays:
    """Batches one behind the other."""
    batches = [*batches]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def global_batch(source: Source, step: int, shards: int) -> Arrays:
    return joined(source.train_batch(step, shard) for shard in range(shards))


def everything(examples: Examples) -> Arrays:
    return examples.read(np.arange(len(examples)))


def reported(
    evaluator: Evaluator, *batches: tuple[np.ndarray, dict[str, Tensor], dict[str, Tensor]]
) -> Report:
    """Returns the report on these batches: indices, the batch, and the outputs of a prediction."""
    for indices, batch, outputs in batches:
        evaluator.add(indices, batch, Prediction({}, outputs))
    return evaluator.report(evaluator.rows())


def shown(source: Source, set_name: str, example: Arrays, answer: np.ndarray) -> str:
    """Returns what an evaluation shows of a set with this first example and this answer to it."""
    twice = {name: torch.from_numpy(np.stack([row, row])) for name, row in example.items()}
    outputs = {"answer": torch.from_numpy(np.stack([answer, answer]))}
    evaluators = source.evaluators(set_name)
    return "".join(reported(made, (np.arange(2), twice, outputs)).text for made in evaluators)


def built(folder: Path, builder: str, *arguments: object) -> Path:
    """The folder that a builder writes."""
    main = import_module(f"data.build.{builder}").main
    assert main([*map(str, arguments), "--output-dir", str(folder)]) == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_table(folder: Path, split: str, rows: Iterable[tuple[str, str, int]]) -> None:
    """A CSV file of questions, answers and ratings, as the hub has them."""
    folder.mkdir(exist_ok=True)
    lines = [f"here,{question},{answer},{rating}" for question, answer, rating in rows]
    (folder / f"{split}.csv").write_text("\n".join(["source,question,answer,rating", *lines, ""]))


def says(**changes: object) -> Damage:
    """`dataset.json` with other values."""

    def damage(folder: Path) -> None:
        path = folder / "dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage
