"""Small datasets whose rows say which they are, and what puzzles are checked by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from data.source import Arrays, Source
from utils.measure.evaluator import Prediction

SEQ_LEN = 4
VOCAB = 17


def row_numbers(inputs: np.ndarray) -> np.ndarray:
    """Which rows these are, by their tokens."""
    return (inputs.astype(np.int64) - 1) @ (16 ** np.arange(SEQ_LEN))


def write_dataset(
    folder: Path, groups: list[list[int]], split: str = "train", name: str = "all", **changes
) -> dict[str, np.ndarray]:
    """A dataset of groups of puzzles of so many examples; row r holds r in base 16, puzzle p has
    identifier p + 1.
    """
    sizes = [size for group in groups for size in group]
    rows = np.arange(sum(sizes))
    inputs = (rows[:, None] // 16 ** np.arange(SEQ_LEN) % 16 + 1).astype(np.uint8)
    labels = inputs.copy()
    labels[:, 0] = 0
    arrays: dict[str, np.ndarray] = {
        "inputs": inputs,
        "labels": labels,
        "puzzle_identifiers": np.arange(1, len(sizes) + 1, dtype=np.int32),
        "puzzle_indices": np.cumsum([0, *sizes]).astype(np.int32),
        "group_indices": np.cumsum([0, *(len(group) for group in groups)]).astype(np.int32),
    }
    (folder / split).mkdir(parents=True, exist_ok=True)
    for field, array in arrays.items():
        np.save(folder / split / f"{name}__{field}.npy", array)
    content: dict[str, object] = {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": VOCAB,
        "seq_len": SEQ_LEN, "num_puzzle_identifiers": len(sizes) + 1, "total_groups": len(groups),
        "mean_puzzle_examples": float(np.mean(sizes)), "sets": [name], "something_new": 1,
    } | changes  # fmt: skip
    (folder / split / "dataset.json").write_text(json.dumps(content))
    return arrays


def ragged_groups(count: int, seed: int = 0) -> list[list[int]]:
    """Groups of one to three puzzles of one to six examples."""
    rng = np.random.default_rng(seed)
    return [[int(size) for size in rng.integers(1, 7, rng.integers(1, 4))] for _ in range(count)]


def shown(source: Source, set_name: str, example: Arrays, answer: np.ndarray) -> str:
    """Returns what an evaluation shows of a set with this first example and this answer to it."""
    text = ""
    for evaluator in source.evaluators(set_name):
        batch = {name: torch.from_numpy(np.stack([row, row])) for name, row in example.items()}
        evaluator.add(
            np.array([0, 1]),
            batch,
            Prediction({}, {"answer": torch.from_numpy(np.stack([answer, answer]))}),
        )
        text += evaluator.report(evaluator.rows()).text
    return text
