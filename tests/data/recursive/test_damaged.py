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
from tests.sources import opened
from utils.command.instantiate import make
from utils.errors import ConfigError, LocalError

Damage = Callable[[Path], object]  # of the folder of a split
ROWS = 20


def source(path: Path, batch: int = 8, **more) -> PuzzleSource:
    return opened(
        PuzzleSource,
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


def header(field: str, old: bytes, new: bytes) -> Damage:
    """Other words in the header, of the same length."""
    return raw(field, lambda content: content.replace(old, new + b" " * (len(old) - len(new)), 1))


def header_of(field: str, words: str) -> Damage:
    """A header of one's own before no values."""
    return raw(
        field, lambda _: b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words.encode()
    )


def shaped(shape: str) -> Damage:
    return header_of("inputs", "{'descr': '|u1', 'fortran_order': False, 'shape': " + shape + "}")


def instead(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def zipped(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, np.zeros((ROWS, 4), np.uint8))


DAMAGE: list[tuple[str, Damage, str]] = [
    # dataset.json
    (
        "no json",
        instead("dataset.json", lambda _: None),
        "no train/dataset.json there; build it with python -m data.build.sudoku",
    ),
    (
        "json is a folder",
        instead("dataset.json", os.mkdir),
        "train/dataset.json cannot be read (Is a directory)",
    ),
    (
        "json is a pipe",
        instead("dataset.json", os.mkfifo),
        "train/dataset.json cannot be read (not a plain file)",
    ),
    ("half a json", text("{"), "dataset.json cannot be read"),
    ("json is a list", text("[]"), "dataset.json holds a list"),
    ("little json", text('{"pad_id": 0}'), "dataset.json lacks ignore_label_id"),
    ("not UTF-8", text(b'{"pad_id": "\xe9"}'), "dataset.json cannot be read ('utf-8'"),
    ("nested lists", text("[" * 100_000), "dataset.json cannot be read (maximum recursion depth"),
    ("nested lists as number", says(seq_len=json.loads("[" * 300 + "]" * 300)), "seq_len=[[[["),
    (
        "5,000 digits",
        text('{"vocab_size": ' + "9" * 5000 + "}"),
        "dataset.json cannot be read (Exceeds the limit",
    ),
    ("4,000 digits", says(vocab_size=10**4000), "000 is not in 1 … 1048576"),
    ("huge vocabulary", says(vocab_size=10**12), "vocab_size=1000000000000 is not in 1 … 1048576"),
    ("huge length", says(seq_len=10**12), "seq_len=1000000000000 is not in 1 … 2147483647"),
    (
        "huge table",
        says(num_puzzle_identifiers=2**31),
        "num_puzzle_identifiers=2147483648 is not in 1 … 2147483647",
    ),
    ("no vocabulary", says(vocab_size=0), "vocab_size=0 is not in 1 …"),
    ("a negative length", says(seq_len=-4), "seq_len=-4 is not in 1 …"),
    ("NaN", says(vocab_size=float("nan")), "vocab_size=nan is not a whole number"),
    ("infinity", says(seq_len=float("inf")), "seq_len=inf is not a whole number"),
    ("a fraction", says(ignore_label_id=0.5), "ignore_label_id=0.5 is not a whole number"),
    ("true", says(pad_id=True), "pad_id=True is not a whole number"),
    ("null", says(pad_id=None), "pad_id=None is not a whole number"),
    ("lines for a number", says(pad_id="1\n2\0" + "x" * 1000), "pad_id='1\\n2\\x00"),
    ("a pad beyond", says(pad_id=17), "pad_id=17 is not in 0 … vocab_size - 1 = 16"),
    ("a huge pad", says(pad_id=-(10**4000)), "is not in 0 … vocab_size - 1 = 16"),
    (
        "a blank beyond",
        says(blank_identifier_id=21),
        "blank_identifier_id=21 is not in 0 … num_puzzle_identifiers - 1 = 20",
    ),
    ("a number as fingerprint", says(fingerprint=5), "fingerprint=5 is not a line of plain text"),
    (
        "half a character as fingerprint",
        says(fingerprint="\ud800"),
        "fingerprint='\\ud800' is not a line of plain text",
    ),
    (
        "lines as fingerprint",
        says(fingerprint="a\nb"),
        "fingerprint='a\\nb' is not a line of plain text",
    ),
    ("sets are a text", says(sets="all"), "sets='all' is not a list of names"),
    ("no sets", says(sets=[]), "sets=[] is not a list of names"),
    ("a set is a number", says(sets=["all", 1]), "sets=['all', 1] is not a list of names"),
    ("a set twice", says(sets=["all", "all"]), "sets=['all', 'all'] names a set twice"),
    *(
        (
            f"set {name[:9]!r}",
            says(sets=[name]),
            " is not a list of names (letters, digits, _ . + -)",
        )
        for name in (
            "../x",
            "/etc/x",
            "",
            ".",
            "..",
            ".hidden",
            "a/b",
            "a\\b",
            "a\0b",
            "a\nb",
            "all\n",
            "-x",
            "x" * 101,
            "é",
            "a b",
        )
    ),
    # what is a file, and what it begins with
    ("no labels", instead("all__labels.npy", lambda _: None), "all__labels.npy is missing"),
    (
        "a folder",
        instead("all__inputs.npy", os.mkdir),
        "all__inputs.npy cannot be read (Is a directory)",
    ),
    (
        "a pipe",
        instead("all__inputs.npy", os.mkfifo),
        "all__inputs.npy cannot be read (not a plain file)",
    ),
    (
        "a link to nothing",
        instead("all__inputs.npy", lambda path: path.symlink_to("nowhere")),
        "all__inputs.npy is missing",
    ),
    (
        "a link to itself",
        instead("all__inputs.npy", lambda path: path.symlink_to(path)),
        "all__inputs.npy cannot be read",
    ),
    (
        "a zip",
        instead("all__inputs.npy", zipped),
        "all__inputs.npy cannot be read (the magic string is not correct",
    ),
    (
        "a zip of indices",
        instead("all__puzzle_indices.npy", zipped),
        "all__puzzle_indices.npy cannot be read",
    ),
    (
        "half a zip",
        raw("inputs", lambda _: b"PK\x03\x04 and nothing"),
        "all__inputs.npy cannot be read",
    ),
    ("an empty file", raw("inputs", lambda _: b""), "all__inputs.npy cannot be read"),
    (
        "half a header",
        raw("inputs", lambda content: content[:40]),
        "all__inputs.npy cannot be read",
    ),
    (
        "format 9",
        raw("inputs", lambda content: content[:6] + b"\x09" + content[7:]),
        "all__inputs.npy cannot be read",
    ),
    (
        "a header of minus signs",
        header_of("inputs", "-" * 9000 + "1"),
        "all__inputs.npy cannot be read",
    ),
    ("a header of brackets", header_of("inputs", "(" * 9000), "all__inputs.npy cannot be read"),
    ("a header that cannot be", header_of("inputs", "{[]: 1}"), "all__inputs.npy cannot be read"),
    (
        "a header of mixed keys",
        header_of("inputs", "{1: 1, 'a': 1}"),
        "all__inputs.npy cannot be read",
    ),
    # what a header claims
    (
        "a few bytes less",
        raw("inputs", lambda content: content[:-30]),
        "holds 50 bytes of values, but shape (20, 4) of uint8 takes 80",
    ),
    (
        "a few bytes more",
        raw("inputs", lambda content: content + b"\1" * 4),
        "holds 84 bytes of values, but shape (20, 4) of uint8",
    ),
    (
        "fewer indices",
        raw("puzzle_indices", lambda content: content[:-4]),
        "holds 80 bytes of values, but shape (21,) of int32 takes 84",
    ),
    (
        "a huge shape",
        header("inputs", b"(20, 4), }      ", b"(2000000000,4),}"),
        "takes 8000000000",
    ),
    (
        "a huge index",
        header("puzzle_indices", b"(21,), }        ", b"(4000000000000,)"),
        "all__puzzle_indices.npy",
    ),
    ("an overflow", shaped(f"({2**40}, {2**40})"), "takes 1208925819"),
    ("no rows of endless length", shaped(f"(0, {10**30})"), "has shape (0, 1"),
    ("a negative shape", shaped("(-1, 0)"), "has shape (-1, 0)"),
    (
        "floats",
        array("inputs", lambda a: a.astype(float)),
        "all__inputs.npy holds float64, not whole numbers",
    ),
    ("truths", array("inputs", lambda a: a > 0), "all__inputs.npy holds bool, not whole numbers"),
    (
        "durations",
        array("labels", lambda a: a.astype("m8[s]")),
        "all__labels.npy holds timedelta64[s], not whole numbers",
    ),
    (
        "objects",
        array("inputs", lambda a: np.full(20, {})),
        "all__inputs.npy holds object, not whole numbers",
    ),
    ("pairs", array("inputs", lambda a: np.zeros((20, 4), "i4, i4")), "not whole numbers"),
    (
        "floating indices",
        array("group_indices", lambda a: a.astype(float)),
        "all__group_indices.npy holds float64",
    ),
    (
        "a single number",
        array("puzzle_indices", lambda a: np.int64(3)),
        "all__puzzle_indices.npy has shape ()",
    ),
    ("a row", array("inputs", lambda a: a[0]), "all__inputs.npy has shape (4,)"),
    (
        "a table of indices",
        array("puzzle_indices", lambda a: a[None]),
        "all__puzzle_indices.npy has shape (1, 21)",
    ),
    # what the numbers are
    (
        "longer rows",
        array("inputs", lambda a: np.ones((20, 5), int)),
        "rows of 5, but seq_len is 4",
    ),
    (
        "a label row less",
        array("labels", lambda a: a[:19]),
        "has shape (19, 4), but inputs (20, 4)",
    ),
    ("a token beyond", cell("inputs", 17), "all__inputs.npy holds 17, not in 0 … 16"),
    (
        "a token that would wrap",
        cell("inputs", 2**32 + 1),
        "all__inputs.npy holds 4294967297, not in 0 … 16",
    ),
    (
        "a label that would wrap",
        cell("labels", 2**32 + 1),
        "all__labels.npy holds 4294967297, not in 0 … 16",
    ),
    (
        "a label that would wrap to IGNORE",
        cell("labels", 2**32 + IGNORE),
        "all__labels.npy holds 4294967196, not in 0 … 16",
    ),
    (
        "an unsigned label",
        cell("labels", 2**64 - 3, np.uint64),
        "all__labels.npy holds 18446744073709551613",
    ),
    (
        "a label that is not the ignored one",
        cell("labels", IGNORE),
        "all__labels.npy holds -100, not in 0 … 16",
    ),
    ("a negative label", cell("labels", -3), "all__labels.npy holds -3, not in 0 … 16"),
    (
        "an id that would wrap",
        cell("puzzle_identifiers", 2**32 + 1),
        "puzzle_identifiers.npy holds 4294967297, not in 0 … 20",
    ),
    (
        "an id beyond",
        cell("puzzle_identifiers", 21),
        "puzzle_identifiers.npy holds 21, not in 0 … 20",
    ),
    (
        "two indices",
        array("puzzle_indices", lambda a: a[:2]),
        "has 2 entries for 20 puzzles, not 21",
    ),
    ("an index beyond", cell("puzzle_indices", 21, row=20), "does not rise from 0 to the 20 rows"),
    (
        "an index that would wrap",
        cell("puzzle_indices", 2**64 - 1, np.uint64),
        "does not rise from 0 to the 20 rows",
    ),
    ("an index of 2**32", cell("puzzle_indices", 2**32), "does not rise from 0 to the 20 rows"),
    (
        "falling groups",
        array("group_indices", lambda a: [0, 30, 20]),
        "does not rise from 0 to the 20 puzzles",
    ),
    (
        "falling unsigned groups",
        array("group_indices", lambda a: np.uint8([0, 30, 20])),
        "does not rise from 0 to the 20 puzzles",
    ),
    ("an empty group", array("group_indices", lambda a: [0, 0, 20]), "has a group without puzzles"),
    (
        "no group indices",
        array("group_indices", lambda a: a[:0]),
        "group_indices.npy has 0 entries for 0 groups, not 1",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE]
)
def test_damaged_datasets_are_named(tmp_path: Path, damage: Damage, message: str) -> None:
    write_dataset(tmp_path, [[1]] * ROWS)
    source(tmp_path)
    damage(tmp_path / "train")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"data_path={tmp_path}: ")
    assert message in line
    assert line.isprintable()
    assert len(line) < 500 + len(str(tmp_path))


def emptied(folder: Path) -> None:
    for field, shape in {
        "inputs": (0, 4),
        "labels": (0, 4),
        "puzzle_identifiers": 0,
        "puzzle_indices": 1,
        "group_indices": 1,
    }.items():
        np.save(folder / f"all__{field}.npy", np.zeros(shape, np.int32))


def test_a_dataset_of_nothing_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [[1]] * ROWS)
    emptied(tmp_path / "train")
    with pytest.raises(ConfigError, match="data_path: the training sets hold no puzzles"):
        source(tmp_path)


LAYOUTS: list[tuple[str, list[Damage]]] = [
    (
        "wider",
        [
            array("inputs", lambda a: a.astype(np.int64)),
            array("labels", lambda a: a.astype(np.int16)),
        ],
    ),
    ("unsigned", [array(f, lambda a: a.astype(np.uint64)) for f in ARRAYS]),
    ("small", [array(f, lambda a: a.astype(np.uint8)) for f in ARRAYS]),
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
        for ignored in (IGNORE, -7, VOCAB, 2**32 + 1, 10**15)
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
        ("inputs", 99, np.uint8),
        ("inputs", 2**32 + 1, np.int64),
        ("labels", -3, np.int8),
        ("labels", IGNORE, np.int64),
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


@pytest.mark.parametrize("rows", [2**50, 2**62])
def test_a_table_that_fits_no_memory_is_one_line(rows: int) -> None:
    with pytest.raises(
        ConfigError, match=r"arch: models\.sparse_embedding\.SparseEmbedding.* memory|overflowed"
    ):
        make({"_target_": "models.sparse_embedding.SparseEmbedding", "width": 2}, "arch", rows)
