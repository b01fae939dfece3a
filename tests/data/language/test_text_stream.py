"""Streams of documents: the same whoever reads them, every document once, and on from where a run
was.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from data.language.text_files import Documents, TextFiles
from data.language.text_stream import StreamSource
from data.stream import Cursors
from tests.data.helpers import everything, joined
from tests.making import make_source
from tests.runs import EXACT, TINY_GPT, digest, faulty, stopped, train
from utils.errors import ConfigError

DOCUMENTS = [f"{number:05} " + "sea " * (number % 7) for number in range(1000)]
BEGIN = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [DOCUMENTS[:300], DOCUMENTS[300:600], DOCUMENTS[600:]]
    return write_files(tmp_path_factory.mktemp("texts") / "texts", ".jsonl", texts)


def source(folder: Path | None, **more) -> StreamSource:
    run = {"seed": 0, "shards": 4, "global_batch_size": 8, "max_steps": 200, "seq_len": 16}
    return make_source("stream", **run | {"data_path": folder and str(folder)} | more)


def read(made: StreamSource, shard: int, steps: range) -> np.ndarray:
    """A shard's windows behind each other."""
    rows = joined(made.train_batch(step, shard) for step in steps)
    inputs, labels = rows["inputs"].reshape(-1), rows["labels"].reshape(-1)
    assert np.array_equal(inputs[1:], labels[:-1])
    return inputs


def documents(tokens: np.ndarray) -> list[str]:
    """Those that are whole."""
    pieces = np.split(tokens, np.flatnonzero(tokens == BEGIN))[1:-1]
    return [bytes(piece[1:].tolist()).decode() for piece in pieces]


def test_streams_share_out_the_documents_and_begin_again(folder: Path) -> None:
    made = source(folder)
    held_out = everything(made.eval_sets()["val"])
    counted = int((held_out["labels"] >= 0).sum())
    val = documents(np.append(held_out["inputs"].reshape(-1)[:counted], BEGIN))
    assert 20 < len(val) < 90
    seen = Counter(text for shard in range(4) for text in documents(read(made, shard, range(200))))
    missing = {*DOCUMENTS} - {*seen} - {*val}
    assert len(missing) <= 1, "all are read; the last held-out one is cut off"
    assert not {*val} & {*seen}
    assert max(seen.values()) > 1, "a stream begins again"
    other = source(folder, seed=5)
    first = Counter(text for shard in range(4) for text in documents(read(other, shard, range(20))))
    assert max(first.values()) == 1, "no document is in two streams"
    of_a_file = documents(read(source(folder / "01.jsonl"), 0, range(20)))
    assert {*of_a_file} <= {*DOCUMENTS[300:600]}


def test_a_dataset_that_datasets_reads_gives_the_same_windows(folder: Path) -> None:
    """As one on the hub is read; here it is a folder."""
    here, there = source(folder), source(None, hub=str(folder))
    for shard in (0, 3):
        assert np.array_equal(read(here, shard, range(90)), read(there, shard, range(90)))
        assert here.cursors(90, [shard]) == there.cursors(90, [shard])


@pytest.mark.parametrize("name", ["", "train"])
def test_what_datasets_has_saved_gives_the_same_windows(name: str, tmp_path: Path) -> None:
    """As a data set of one split, and with a folder for each."""
    write_files(tmp_path / "texts", ".jsonl", [DOCUMENTS[:500], DOCUMENTS[500:]])
    rows = Dataset.from_dict({"text": DOCUMENTS})
    rows.save_to_disk(tmp_path / "saved" / name, num_shards=2)
    here, there = source(tmp_path / "texts"), source(None, hub=str(tmp_path / "saved"))
    assert np.array_equal(read(here, 1, range(90)), read(there, 1, range(90)))
    with pytest.raises(ConfigError, match=r"what save_to_disk wrote is read as data.hub=FOLDER"):
        source(tmp_path / "saved")


# a stream of 4 is read through after 80 steps or so
@pytest.mark.parametrize("step", [1, 90])
@pytest.mark.parametrize("ahead", [0, 1])
def test_it_goes_on_exactly_also_on_other_ranks(folder: Path, step: int, ahead: int) -> None:
    """With a step loaded that is not trained: it is loaded again."""
    whole, made = source(folder), source(folder)
    for shard in range(4):
        read(made, shard, range(step + ahead))
    later = source(folder)
    later.train_batch(0, 1)  # a run looks at the first step before it is restored
    later.go_on(made.cursors(step, (1, 2)))
    for shard in (1, 2):
        assert np.array_equal(
            read(later, shard, range(step, step + 20)),
            read(whole, shard, range(step + 20))[step * 32 :],
        )
    later.train_batch(0, 1)
    assert later.train_batch(step + 19, 1)["inputs"].shape == (2, 16), (
        "looking at the first step disturbs nothing"
    )


def test_a_look_at_another_ranks_shard_is_not_saved(folder: Path) -> None:
    """The trial looks at two shards of one row each; this rank has one."""
    made = source(folder)
    made.train_batch(0, 3)
    read(made, 1, range(2))
    saved = Cursors(made, lambda: 2, [1]).state()
    assert [*saved] == [1]
    later = source(folder)
    Cursors(later, lambda: 0, [1]).load(saved)
    assert np.array_equal(read(later, 1, range(2, 4)), read(made, 1, range(2, 4)))


@pytest.mark.parametrize(
    ("files", "keys", "line"),
    [
        ([["one", "two"]], {}, "x, shard 3: no documents for training in it; use fewer shards"),
        ([DOCUMENTS], {"val_share": 0.9999999}, "x, shard 3: no documents for training in it"),
        ([["one"], ["two", 3]], {}, "1.jsonl: line 2: text is int, not text"),
    ],
)
def test_what_cannot_be_streamed_is_one_line(
    files: list[list[Any]], keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_files(tmp_path / "x", ".jsonl", files)
    with pytest.raises(ConfigError, match=line):
        read(source(tmp_path / "x", seq_len=1, **keys), 3, range(1))


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"x.parquet: cannot be read as Parquet"):
        source(tmp_path)


def write_files(folder: Path, suffix: str, rows: list[list[Any]]) -> Path:
    """Files of one kind with these texts."""
    from pyarrow import parquet, table

    folder.mkdir()
    for number, texts in enumerate(rows):
        path = folder / f"{number:02}{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            parquet.write_table(table({"text": texts}), path, row_group_size=5)
    return folder


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("seed", range(3))
def test_documents_come_as_datasets_orders_them(seed: int, suffix: str, tmp_path: Path) -> None:
    """The reference for the order: the files as `datasets` streams them. It deals out whole files
    if they are a multiple of the shards, else rows.
    """
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    rng, shards = np.random.default_rng(seed), 4
    names = iter(range(10_000, 20_000))
    files = [
        [f"{next(names)} " + "sea " * int(rng.integers(0, 9)) for _ in range(size)]
        for size in rng.integers(9, 60, size=int(rng.integers(1, 13)))
    ]
    folder = write_files(tmp_path / "texts", suffix, files)
    kind = "json" if suffix == ".jsonl" else "parquet"
    paths = [str(path) for path in sorted(folder.iterdir())]
    even = len(paths) - len(paths) % shards
    parts = [
        load_dataset(kind, data_files=some, split="train", streaming=True)
        for some in (paths[:even], paths[even:])
        if some
    ]
    for shard in range(shards):
        streams = [split_dataset_by_node(part, shard, shards) for part in parts]
        texts = [row["text"] for stream in streams for row in stream]
        assert [*Documents(TextFiles(str(folder), "text"), shard, shards)] == texts
        # from any row on
        documents = Documents(TextFiles(str(folder), "text"), shard, shards)
        positions = [documents.position, *(documents.position for _ in documents)]
        for done in range(0, len(texts), 5):
            later = Documents(TextFiles(str(folder), "text"), shard, shards, *positions[done])
            assert [*later] == texts[done:]


def test_files_are_read_once_but_for_those_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_files(
        tmp_path / "texts", ".jsonl", [[f"{n} {row}" for row in range(3)] for n in range(9)]
    )
    texts, opened = TextFiles(str(folder), "text"), Counter[int]()
    rows = texts.rows
    monkeypatch.setattr(
        texts, "rows", lambda file, some: (opened.update([file]), rows(file, some))[1]
    )
    read = [text for shard in range(4) for text in Documents(texts, shard, 4)]
    assert len(read) == len({*read}) == 27
    assert opened == {**dict.fromkeys(range(8), 1), 8: 4}


def test_a_run_says_that_files_are_read_often(folder: Path) -> None:
    line = f"data_path={folder}: is read 4.0 times, as all of shards=4 read 3 of 3 files; make the"
    assert source(folder).remark.startswith(line)
    assert not source(folder, shards=1).remark


@pytest.mark.slow
@pytest.mark.parametrize("data", ["tokens", "stream"])
def test_a_troubled_run_goes_on_at_another_number_of_ranks_to_the_same_bits(
    data: str, folder: Path, tmp_path: Path
) -> None:
    own = f"data_path={folder}" if data == "stream" else "data.embedded.mebibytes=2"
    tiny = [each for each in TINY_GPT if "embedded" not in each]
    lines = [*tiny, *EXACT, "max_steps=16", f"data={data}", own]
    undisturbed = digest(train(tmp_path / "whole", *lines).directory)
    stopped(tmp_path / "stopped", *lines, ranks=2)
    assert digest(train(tmp_path / "stopped", *lines).directory) == undisturbed
    often = [*lines, "checkpoint_interval=3"]
    done = faulty(tmp_path / "killed", "kill@objective", 1, 9 * 4, *often, ranks=2)
    assert all(rank.returncode for rank in done)
    assert (tmp_path / "killed" / "checkpoints" / "latest").exists()
    assert digest(train(tmp_path / "killed", *often, ranks=2).directory) == undisturbed
