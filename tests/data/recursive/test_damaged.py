"""Datasets that are not what they say: one line that names the file, and never a wrong example."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from contract import IGNORE, Arrays
from data.recursive.puzzles import PuzzleSource
from data.stream import eval_batches, train_loader
from tests.data.helpers import Damage, everything, says
from tests.data.recursive.helpers import source, write_dataset
from utils.errors import ConfigError

ROWS = 20


def text(content: str) -> Damage:
    return lambda folder: (folder / "dataset.json").write_text(content)


def array(field: str, change: Callable[[np.ndarray], object]) -> Damage:
    """Another array in the place of one; objects are pickled, as NumPy would."""

    def damage(folder: Path) -> None:
        path = folder / f"all__{field}.npy"
        np.save(path, np.asarray(change(np.load(path))), allow_pickle=True)

    return damage


def cell(field: str, value: int, dtype: type = np.int64, row: int = 7) -> Damage:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(dtype)
        values[(row, 2) if values.ndim == 2 else row] = value
        return values

    return array(field, change)


JSON, INPUTS, LABELS = "dataset.json", "all__inputs.npy", "all__labels.npy"
IDS, PUZZLES, GROUPS = (
    f"all__{name}.npy" for name in ("puzzle_identifiers", "puzzle_indices", "group_indices")
)


def shorter(folder: Path) -> None:
    path = folder / INPUTS
    path.write_bytes(path.read_bytes()[:-30])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "half a json": (text("{"), JSON),
    "little json": (text('{"pad_id": 0}'), "ignore_label_id"),
    "huge vocabulary": (says(vocab_size=10**12), "vocab_size"),
    "a pad beyond": (says(pad_id=17), "pad_id"),
    "a set elsewhere": (says(sets=["../x"]), "sets"),
    "no labels": (lambda folder: (folder / LABELS).unlink(), LABELS),
    "a few bytes less": (shorter, INPUTS),
    "floats": (array("inputs", lambda a: a.astype(float)), INPUTS),
    "longer rows": (array("inputs", lambda a: np.ones((20, 5), int)), INPUTS),
    "a label row less": (array("labels", lambda a: a[:19]), LABELS),
    "a token beyond": (cell("inputs", 17), INPUTS),
    "a token that would wrap": (cell("inputs", 2**32 + 1), INPUTS),
    "a label that would wrap to IGNORE": (cell("labels", 2**32 + IGNORE), LABELS),
    "an id beyond": (cell("puzzle_identifiers", 21), IDS),
    "an index beyond": (cell("puzzle_indices", 21, row=20), PUZZLES),
    "falling groups": (array("group_indices", lambda a: np.uint8([0, 30, 20])), GROUPS),
    "an empty group": (array("group_indices", lambda a: [0, 0, 20]), GROUPS),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("split", ["train", "test"])
def test_damaged_datasets_are_named(tmp_path: Path, name: str, split: str) -> None:
    """At the latest when a wrong value is read."""
    damage, named = DAMAGE[name]
    for folder in ("train", "test"):
        write_dataset(tmp_path, [[1]] * ROWS, folder)
    read(tmp_path)
    damage(tmp_path / split)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"data_path={tmp_path}: {split}/")
    assert named in line
    assert line.isprintable()


def read(path: Path) -> None:
    """Reads every row."""
    made = source(path)
    list(train_loader(made, [range(2)], range(made.length.total_steps), 0))
    list(eval_batches(made.eval_sets()["all"], 7))


LAYOUTS: dict[str, list[Damage]] = {
    "wider": [array("inputs", np.int64), array("labels", np.int16)],
    "nothing ignored": [says(ignore_label_id=None)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_numbers_in_another_layout_are_the_same_examples(
    tmp_path: Path, name: str
) -> None:
    write_dataset(tmp_path, [[1, 2], [3]] * 7)
    shutil.copytree(tmp_path / "train", tmp_path / "test")

    def read_from(made: PuzzleSource) -> list[Arrays]:
        batches = [made.train_batch(step, 1) for step in range(5)]
        return [*batches, everything(made.eval_sets()["all"])]

    before = read_from(source(tmp_path))
    for split in ("train", "test"):
        for change in LAYOUTS[name]:
            change(tmp_path / split)
    ignored = 0 if name == "nothing ignored" else IGNORE
    for had, have in zip(before, read_from(source(tmp_path)), strict=True):
        for field in had:
            assert have[field].dtype == np.int32
            assert (have[field] == np.where(had[field] == IGNORE, ignored, had[field])).all()
