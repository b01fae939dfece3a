"""From text to shards: the same input gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.language.token_files import open_corpus
from tests.data.helpers import built, files

RNG = np.random.default_rng(0)
WORDS = ["the", "sea", "né", "ship", "  \n", "<|begin|>", "at", "日本", "🙂", "of", "salt."]
DOCUMENTS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 60))) for _ in range(400)]


def write_documents(folder: Path) -> Path:
    """The same documents, some in each format, and a different text."""
    from pyarrow import parquet, table

    folder.mkdir()
    lines = [json.dumps({"text": text, "n": 1}) + "\n" for text in DOCUMENTS[:200]]
    (folder / "a.jsonl").write_text("".join(lines))
    parquet.write_table(table({"text": DOCUMENTS[200:399]}), folder / "b.parquet")
    (folder / "c.txt").write_text(DOCUMENTS[399])
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("texts") / "in")


def read_back(folder: Path) -> list[str]:
    """All documents, in the order of the files."""
    corpus = open_corpus("data_path=x", folder)
    assert corpus.tokenizer is not None
    assert corpus.begin is not None
    texts = []
    for split in ("train", "val"):
        for tokens in corpus.files[split]:
            assert tokens[0] == corpus.begin
            pieces = np.split(tokens.astype(np.int64), np.flatnonzero(tokens == corpus.begin))[1:]
            texts += [corpus.tokenizer.decode(piece[1:].tolist()) for piece in pieces]
            if corpus.token_bytes:
                size = sum(len(text.encode()) for text in texts[-len(pieces) :])
                assert np.array(corpus.token_bytes)[tokens.astype(np.int64)].sum() == size
    return texts


@pytest.mark.parametrize(
    "kind", [["--tokenizer", "bytes"], ["--train-bpe", "300"]], ids=["bytes", "bpe"]
)
def test_every_document_can_be_read_back_and_a_rebuild_has_the_same_bytes(
    kind: list[str], texts: Path, tmp_path: Path
) -> None:
    given = "tokens", "--input", texts, *kind, "--val-share", 0.1
    first = files(built(tmp_path / "one", *given))
    assert sorted(read_back(tmp_path / "one")) == sorted(DOCUMENTS)
    assert first == files(built(tmp_path / "two", *given))
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}, "nothing is left beside it"
    said = json.loads(first["dataset.json"])
    assert len(said["token_bytes"]) == said["vocab_size"] == (257 if "bytes" in kind else 300)
    val = open_corpus("x", tmp_path / "one").files["val"]
    assert 15 < sum((tokens == tokens[0]).sum() for tokens in val) < 80


def test_a_single_text_is_cut_where_its_last_part_begins(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(DOCUMENTS))
    given = "--input", tmp_path / "x.txt", "--tokenizer", "bytes", "--val-share", 0.1
    built(tmp_path / "out", "tokens", *given)
    train, val = read_back(tmp_path / "out")
    assert train + val == "".join(DOCUMENTS)
    assert len(train) == int(0.9 * len(train + val))


def test_one_of_a_few_documents_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(DOCUMENTS[:5]):
        (tmp_path / f"{number}.txt").write_text(text)
    inputs = [tmp_path / f"{number}.txt" for number in range(5)]
    built(tmp_path / "out", "tokens", "--input", *inputs, "--train-bpe", 257)
    corpus = open_corpus("x", tmp_path / "out")
    documents = {
        split: sum((tokens == corpus.begin).sum() for tokens in corpus.files[split])
        for split in ("train", "val")
    }
    assert documents == {"train": 4, "val": 1}
    assert "one is held out instead of --val-share 0.01" in capsys.readouterr().out
