"""From text to shards: the same input gives the same bytes, in one go or killed in between; what is
wrong is one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.build import tokens as builder
from data.language.token_files import open_corpus
from tests.ranks import ROOT

RNG = np.random.default_rng(0)
WORDS = ["the", "sea", "né", "ship", "  \n", "is", "sailing", "日本", "🙂", "of", "salt."]
DOCUMENTS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 60))) for _ in range(400)]


def write_documents(folder: Path) -> Path:
    """The same documents, some in each format, and a text of its own."""
    from pyarrow import parquet, table

    folder.mkdir()
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in DOCUMENTS[:200])
    )
    parquet.write_table(table({"text": DOCUMENTS[200:399]}), folder / "b.parquet")
    (folder / "c.txt").write_text(DOCUMENTS[399])
    return folder


def built(folder: Path, *arguments: str) -> dict[str, bytes]:
    assert builder.main([*arguments, "--output-dir", str(folder), "--workers", "1"]) == 0
    assert not [*folder.parent.glob(f"{folder.name}.*")], "nothing is left beside it"
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
                assert np.array(corpus.token_bytes)[tokens.astype(np.int64)].sum() == sum(
                    len(text.encode()) for text in texts[-len(pieces) :]
                )
    return texts


@pytest.mark.parametrize(
    "kind", [["--tokenizer", "bytes"], ["--train-bpe", "300"]], ids=["bytes", "bpe"]
)
def test_every_document_can_be_read_back_and_a_rebuild_has_the_same_bytes(
    kind: list[str], texts: Path, tmp_path: Path
) -> None:
    given = ["--input", str(texts), *kind, "--val-share", "0.1"]
    first = built(tmp_path / "one", *given)
    assert sorted(read_back(tmp_path / "one")) == sorted(DOCUMENTS)
    assert first == built(tmp_path / "two", *given)
    said = json.loads(first["dataset.json"])
    assert len(said["token_bytes"]) == said["vocab_size"] == (257 if "bytes" in kind else 300)
    held_out = read_back(tmp_path / "one")[-said["files"]["val_000000.bin"] :]
    assert 15 < len([text for text in held_out if text]) <= 400
    other = built(tmp_path / "two", *given[:-1], "0.2")
    assert json.loads(other["dataset.json"])["fingerprint"] != said["fingerprint"]
    assert other != first, "an earlier dataset is replaced"


def test_a_single_text_is_cut_where_its_last_part_begins(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(DOCUMENTS))
    built(
        tmp_path / "out",
        "--input",
        str(tmp_path / "x.txt"),
        "--tokenizer",
        "bytes",
        "--val-share",
        "0.1",
    )
    train, val = read_back(tmp_path / "out")
    assert train + val == "".join(DOCUMENTS)
    assert len(train) == int(0.9 * len(train + val))


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    given = ["--input", str(texts), "--train-bpe", "300"]
    code = (
        "import sys; from data.build import tokens; tokens.PART = 500;"
        " sys.exit(tokens.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *given, "--workers", "1", "--output-dir"]
    subprocess.run(
        [*command, str(tmp_path / "whole")], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    process = subprocess.Popen(
        [*command, str(tmp_path / "killed")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    aside, deadline = tmp_path / "killed.building", time.monotonic() + 30
    while not (aside / "part_000002.json").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert aside.exists(), "it was killed before its end"
    made = {
        path: path.stat().st_mtime_ns
        for path in [aside / "tokenizer.json", *aside.glob("train_00000[01].bin")]
    }
    (aside / "train_000099.bin").write_bytes(b"half")  # of a part that has no note
    subprocess.run(
        [*command, str(tmp_path / "killed")], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert {path: (tmp_path / "killed" / path.name).stat().st_mtime_ns for path in made} == made, (
        "what there was is not made again"
    )
    assert len(made) == 3
    whole = contents(tmp_path / "whole")
    assert len(whole) > 20
    assert contents(tmp_path / "killed") == whole
    deadline = time.monotonic() + 10
    while alive(process.pid):
        assert time.monotonic() < deadline, "what it had started outlives it"
        time.sleep(0.05)


def alive(group: int) -> bool:
    """Returns whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
