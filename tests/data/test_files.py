"""The hash of a dataset sees every change, or in a large one changes of names and sizes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data import files
from data.files import content_hash
from tests.data.language.token_helpers import write_corpus
from tests.data.recursive.helpers import write_dataset
from tests.making import make_source


def texts(folder: Path) -> Path:
    for name in ("b", "c"):
        lines = [json.dumps({"text": f"{name} {number} the sea"}) for number in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / "c.jsonl"


def tokens(folder: Path) -> Path:
    write_corpus(folder, train=9_000_000, vocab_size=1 << 16)
    return folder / "train_1.npy"


def puzzles(folder: Path) -> Path:
    write_dataset(folder, [[1]] * 3000)
    return folder / "train" / "all__labels.npy"


def add_one_before(file: Path) -> None:
    (file.parent / "a.jsonl").write_text('{"text": "a new one"}\n')


@pytest.mark.parametrize(
    ("data", "write", "change"),
    [
        ("stream", texts, add_one_before),
        ("stream", texts, lambda file: file.write_text(file.read_text().replace("sea", "SEA"))),
        ("tokens", tokens, lambda file: change_bytes(file, 4_000_000, 1)),
        ("puzzles", puzzles, lambda file: change_bytes(file, 1001, 7)),
    ],
    ids=["a text file more", "other training text", "one token", "one label"],
)
def test_a_change_anywhere_is_another_fingerprint(
    data: str, write: Callable[[Path], Path], change: Callable[[Path], object], tmp_path: Path
) -> None:
    file = write(tmp_path)

    def fingerprint() -> str:
        keys = {"seq_len": 16, "val_tokens": 50} if data != "puzzles" else {}
        made = make_source(data, data_path=str(tmp_path), global_batch_size=8, max_steps=5, **keys)
        return made.spec.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    change(file)
    assert fingerprint() != before


def change_bytes(file: Path, place: int, by: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= by
    file.write_bytes(content)


def test_of_a_large_dataset_names_sizes_and_blocks_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(100_000))
    monkeypatch.setattr(files, "SAMPLED", 20)
    monkeypatch.setattr(files, "BLOCK", 100)

    def digest() -> str:
        return content_hash({path.name: path for path in sorted(tmp_path.iterdir())})

    whole = digest()
    monkeypatch.setattr(files, "HASHED", 150_000)
    before = digest()
    assert before != whole
    change_bytes(tmp_path / "two", 5_000, 1)
    assert digest() == before, "between two blocks"
    change_bytes(tmp_path / "two", 20_099, 1)
    changed = digest()
    assert changed != before
    (tmp_path / "one").rename(tmp_path / "other")
    assert digest() != changed
    (tmp_path / "other").rename(tmp_path / "one")
    assert digest() == changed
    with (tmp_path / "two").open("ab") as file:
        file.write(b"0")
    assert digest() != changed


def test_an_array_and_an_empty_file_are_hashed_too(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    one = np.arange(6, dtype=np.int32)
    arrays = one, one.reshape(2, 3), one + 1
    assert len({content_hash({"x": array, "y": tmp_path / "empty"}) for array in arrays}) == 3
