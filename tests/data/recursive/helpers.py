"""Small datasets whose rows say which they are, and what puzzles are checked by."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from data.recursive.puzzles import PuzzleSource
from tests.making import make_source

SEQ_LEN = 4
VOCAB = 17


def row_numbers(inputs: np.ndarray) -> np.ndarray:
    """Which rows these are, by their tokens."""
    return (inputs.astype(np.int64) - 1) @ (16 ** np.arange(SEQ_LEN))


def write_dataset(
    folder: Path, groups: list[list[int]], split: str = "train", **changes: Any
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
        np.save(folder / split / f"all__{field}.npy", array)
    content: dict[str, object] = {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": VOCAB,
        "seq_len": SEQ_LEN, "num_puzzle_identifiers": len(sizes) + 1, "total_groups": len(groups),
        "mean_puzzle_examples": float(np.mean(sizes)), "sets": ["all"], "something_new": 1,
    } | changes  # fmt: skip
    (folder / split / "dataset.json").write_text(json.dumps(content))
    return arrays


def ragged_groups(count: int, seed: int = 0) -> list[list[int]]:
    """Groups of one to three puzzles of one to six examples."""
    rng = np.random.default_rng(seed)
    return [[int(size) for size in rng.integers(1, 7, rng.integers(1, 4))] for _ in range(count)]


def source(path: Path | None = None, **more: Any) -> PuzzleSource:
    """A source of the dataset at this path; more keys change or add to those of a small run."""
    run = {"seed": 0, "shards": 2, "global_batch_size": 8, "epochs": 6, "eval_interval": 3}
    return make_source("puzzles", **run | {"data_path": path and str(path)} | more)
