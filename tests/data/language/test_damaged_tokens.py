"""Token files that are not what they say: one line that names the file, on all ranks the same, and
nothing hangs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.language.token_files import MAGIC
from tests.data.helpers import Damage, says
from tests.data.language.token_helpers import VOCAB, source, write_corpus, write_npy
from utils.errors import ConfigError

FEW = np.arange(100, dtype=np.uint16)


def bin_file(content: bytes) -> Damage:
    return lambda folder: (folder / "train_0.bin").write_bytes(content)


def header(*numbers: int) -> bytes:
    return np.array([*numbers] + [0] * (256 - len(numbers)), "<i4").tobytes()


def without(*patterns: str) -> Damage:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


BIN, NPY, JSON = "train_0.bin", "train_1.npy", "dataset.json"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "odd length": (bin_file(header(MAGIC, 1, 100) + bytes(199)), BIN),
    "nanoGPT's": (bin_file(FEW.tobytes() * 20), str(MAGIC)),
    "no header": (bin_file(b""), BIN),
    "wrong version": (bin_file(header(MAGIC, 3, 2) + bytes(4)), BIN),
    "signed": (lambda folder: write_npy(folder / NPY, FEW.astype(np.int32)), NPY),
    "no split": (lambda folder: write_npy(folder / "more.npy", FEW), "more.npy"),
    "no training": (without("train*"), "no .npy or .bin file for training"),
    "vocabulary unknown": (without("*.json"), "data.vocab_size"),
    "half a json": (lambda folder: (folder / JSON).write_text("{"), JSON),
    "begin": (says(begin_token=VOCAB), f"begin_token={VOCAB}"),
    "bytes of others": (says(token_bytes=[1, 2]), "token_bytes"),
    "another count": (says(files={BIN: 5}), BIN),
    "no tokenizer": (says(tokenizer="tokenizer.json"), "tokenizer.json"),
    "a damaged tokenizer": (
        lambda folder: (
            says(tokenizer="tokenizer.json")(folder),
            (folder / "tokenizer.json").write_text('{"version": "1.0"}'),
        ),
        "tokenizer.json is not a tokenizer",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_tokens_are_named(tmp_path: Path, name: str) -> None:
    damage, named = DAMAGE[name]
    write_corpus(tmp_path)
    source(tmp_path, vocab_size=65_536)
    damage(tmp_path)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path)
    assert str(caught.value).startswith(f"data_path={tmp_path}: ")
    assert named in str(caught.value)
    assert str(caught.value).isprintable()


def test_documents_may_be_shorter_than_a_window(tmp_path: Path) -> None:
    write_corpus(tmp_path, begin_token=500)
    source(tmp_path, seq_len=667, documents=True, epochs=8)


def test_a_token_beyond_the_vocabulary_ends_the_run_when_it_is_read(tmp_path: Path) -> None:
    tokens = np.zeros(1 << 16, np.uint32)
    place = (1 << 13) + 17
    damaged = tokens.copy()
    damaged[place] = (1 << 32) - 1  # negative in a batch
    for split in ("train", "val"):
        write_npy(tmp_path / f"{split}.npy", tokens)
        write_npy(tmp_path / f"{split}_2.npy", damaged)
    for documents in (False, True):
        keys = {"vocab_size": 9, "documents": documents, "begin_token": 8, "seq_len": 1 << 13}
        made = source(tmp_path, **keys, val_tokens=None, epochs=1)
        said = rf"_2.npy holds token 4294967295 at position {place}, but vocab_size=9;"
        with pytest.raises(ConfigError, match=rf"^data_path=.*: train{said}"):
            [made.train_batch(step, shard) for step in range(128) for shard in range(2)]
        held_out = made.eval_sets()["val"]
        with pytest.raises(ConfigError, match=rf"^data_path=.*: val{said}"):
            held_out.read(np.arange(len(held_out)))
