"""Datasets that are not what they say: one line that names the file, and never a wrong example."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.recursive.puzzle_files import ARRAYS
from data.recursive.puzzles import PuzzleSource
from data.source import IGNORE
from data.stream import ShardStream, eval_batches, train_loader
from tests.data.recursive.helpers import VOCAB, write_dataset
from tests.making import make_source
from utils.errors import ConfigError, LocalError

Damage = Callable[[Path], object]  # of the folder of a split
ROWS = 20


def source(path: Path, batch: int = 8, **more) -> PuzzleSource:
    return make_source(
        "puzzles",
        seed=0,
        shards=2,
        global_batch_size=batch,
        epochs=6,
        eval_interval=3,
        **({"data_path": str(path)} | more),
    )


def says(**changes) -> Damage:
    """`dataset.json` with other values."""

    def damage(folder: Path) -> None:
        path = folder / "dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def text(content: str | bytes) -> Damage:
    return lambda folder: (folder / "dataset.json").write_bytes(
        content.encode() if isinstance(content, str) else content
    )


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


def raw(field: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / f"all__{field}.npy"
        path.write_bytes(change(path.read_bytes()))

    return damage


def instead(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


JSON, INPUTS, LABELS = "dataset.json", "all__inputs.npy", "all__labels.npy"
IDS, PUZZLES, GROUPS = (
    f"all__{name}.npy" for name in ("puzzle_identifiers", "puzzle_indices", "group_indices")
)
DAMAGE: dict[str, tuple[Damage, str]] = {
    "no json": (instead(JSON, lambda _: None), JSON),
    "json is a pipe": (instead(JSON, os.mkfifo), JSON),
    "half a json": (text("{"), JSON),
    "little json": (text('{"pad_id": 0}'), "ignore_label_id"),
    "huge vocabulary": (says(vocab_size=10**12), "vocab_size"),
    "a pad beyond": (says(pad_id=17), "pad_id"),
    "a set elsewhere": (says(sets=["../x"]), "sets"),
    "no labels": (instead(LABELS, lambda _: None), LABELS),
    "a few bytes less": (raw("inputs", lambda content: content[:-30]), INPUTS),
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
def test_damaged_datasets_are_named(tmp_path: Path, name: str) -> None:
    damage, named = DAMAGE[name]
    write_dataset(tmp_path, [[1]] * ROWS)
    source(tmp_path)
    damage(tmp_path / "train")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"data_path={tmp_path}: ")
    assert named in line
    assert line.isprintable()


LAYOUTS: list[tuple[str, list[Damage]]] = [
    (
        "wider",
        [
            array("inputs", lambda a: a.astype(np.int64)),
            array("labels", lambda a: a.astype(np.int16)),
        ],
    ),
    ("big-endian", [array(f, lambda a: a.astype(">i4")) for f in ARRAYS]),
    ("Fortran", [array(f, lambda a: np.asfortranarray(a)) for f in ("inputs", "labels")]),
    (
        "not aligned",
        [
            array("labels", lambda a: a.astype(np.int32)),
            raw("labels", lambda c: c[:8] + b"\x75" + c[9:126] + b"\n" + c[128:]),
        ],
    ),
    (
        "PyTorch's where it has none",
        [
            array("labels", lambda a: np.where(a == 0, -100, a.astype(np.int64))),
            says(ignore_label_id=None),
        ],
    ),
    ("nothing ignored", [says(ignore_label_id=None)]),
    *(
        (
            f"ignored {ignored}",
            [
                array("labels", lambda a, i=ignored: np.where(a == 0, i, a.astype(np.int64))),
                says(ignore_label_id=ignored),
            ],
        )
        for ignored in (IGNORE, VOCAB, 2**32 + 1)
    ),
]


@pytest.mark.parametrize(("name", "changes"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_the_same_numbers_in_another_layout_are_the_same_examples(
    tmp_path: Path, name: str, changes: list[Damage]
) -> None:
    write_dataset(tmp_path, [[1, 2], [3]] * 7)
    shutil.copytree(tmp_path / "train", tmp_path / "test")
    expected = source(tmp_path)
    batches = [expected.train_batch(step, 1) for step in range(5)]
    example = expected.eval_sets()["all"].read(np.arange(14))
    for split in ("train", "test"):
        for change in changes:
            change(tmp_path / split)
    made = source(tmp_path)
    ignored = 0 if name == "nothing ignored" else IGNORE
    for had, have in [
        *zip(batches, (made.train_batch(step, 1) for step in range(5)), strict=True),
        (example, made.eval_sets()["all"].read(np.arange(14))),
    ]:
        for field in had:
            assert have[field].dtype == np.int32
            assert (have[field] == np.where(had[field] == IGNORE, ignored, had[field])).all()


@pytest.mark.parametrize(
    ("field", "value", "dtype"),
    [
        ("inputs", 2**32 + 1, np.int64),
        ("labels", 2**32 + IGNORE, np.uint64),
    ],
)
def test_a_bad_token_between_the_sampled_rows_is_found_when_read(
    tmp_path: Path, monkeypatch, field: str, value: int, dtype: type
) -> None:
    monkeypatch.setattr("data.recursive.puzzle_files.CHECKED_WHOLE", 0)
    monkeypatch.setattr("data.recursive.puzzle_files.SAMPLED_ROWS", 2)
    write_dataset(tmp_path, [[1]] * ROWS)
    write_dataset(tmp_path, [[1]] * ROWS, "test")
    for split in ("train", "test"):
        cell(field, value, dtype)(tmp_path / split)
    made = source(tmp_path)
    line = (
        f"data_path={tmp_path}: %s/all__{field}.npy holds {value}, not in 0 … 16; the dataset is"
        " damaged, build or download it again"
    )
    for workers in (0, 1):
        with pytest.raises(LocalError) as caught:  # one rank reads it, and must speak
            list(train_loader(ShardStream(made, [range(2)], 0, made.length.total_steps), workers))
        assert str(caught.value) == line % "train"
    test = made.eval_sets()["all"]
    batches = eval_batches(test, 7)
    next(batches)
    with pytest.raises(LocalError) as caught:
        next(batches)
    assert str(caught.value) == line % "test"
