"""Windows of tokens: each once an epoch, the same whoever reads them; held-out tokens once each;
prompts and their text.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from contract import IGNORE, Arrays
from data.language.packing import best_fit, pieces_of
from data.language.token_files import Corpus
from data.language.tokens import TokenSource
from data.language.windows import HeldOut
from data.stream import eval_batches
from tests.data.helpers import everything, global_batch, joined, reported
from tests.data.language.token_helpers import source, write_bin, write_corpus, write_npy


def starts(made: TokenSource, steps: range) -> list[int]:
    """The first token of each row, in the order of the global batch."""
    first_tokens = []
    for step in steps:
        batch = global_batch(made, step, 2)
        assert np.array_equal(batch["labels"][:, :-1], batch["inputs"][:, 1:])
        assert (np.diff(np.c_[batch["inputs"], batch["labels"][:, -1]]) == 1).all()
        assert batch["inputs"].dtype == batch["labels"].dtype == np.int32
        first_tokens += batch["inputs"][:, 0].tolist()
    return first_tokens


def test_each_window_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    made = source(write_corpus(tmp_path, train=1000))  # 333 and 667 tokens: 41 and 83 windows
    windows = {*range(0, 41 * 8, 8), *range(333, 333 + 83 * 8, 8)}
    assert made.length.steps_per_epoch == 15.5
    assert made.length.total_steps == 31
    seen = starts(made, range(31))
    assert Counter(seen) == dict.fromkeys(windows, 2)
    assert {*seen[:124]} == windows, "the first epoch has each of them already"
    assert seen[:124] not in (sorted(windows), seen[124:])


def test_splits_are_told_by_name_or_folder(tmp_path: Path) -> None:
    write_bin(tmp_path / "train" / "x.bin", np.arange(100, dtype=np.uint16))
    write_npy(tmp_path / "val" / "x.npy", np.arange(50, dtype=np.uint16))
    made = source(tmp_path, vocab_size=100)
    assert made.spec.vocab_size == 100
    assert len(made.eval_sets()["val"]) == 7
    assert made.spec.fingerprint == source(tmp_path, vocab_size=100, seed=4).spec.fingerprint
    write_npy(tmp_path / "val" / "x.npy", np.arange(1, 51, dtype=np.uint16))
    assert made.spec.fingerprint != source(tmp_path, vocab_size=100).spec.fingerprint
    write_bin(tmp_path / "val" / "x.npy.bin", np.arange(3, dtype=np.uint16))
    assert len(source(tmp_path, vocab_size=100).eval_sets()["val"]) == 8


def write_documents(folder: Path, lengths: list[int]) -> list[np.ndarray]:
    """Two files of documents of these lengths, begin token included; token n of a document is n."""
    documents = [np.r_[7, 1000 : 999 + length].astype(np.uint16) for length in lengths]
    cut = len(documents) // 2
    files = [np.concatenate(part) for part in (documents[:cut], documents[cut:])]
    files[0] = files[0][3:]  # as where another file ends within a document
    for number, tokens in enumerate(files):
        write_npy(folder / f"train_{number}.npy", tokens)
    write_npy(folder / "val.npy", files[0][:100])
    return files


def epoch_of(made: TokenSource, shards: int = 2) -> Arrays:
    """All rows of the first epoch."""
    return joined(global_batch(made, step, shards) for step in range(made.length.total_steps))


PACKED = {"vocab_size": 2000, "begin_token": 7, "documents": True, "seq_len": 16, "epochs": 1}
DOCUMENTS = [*np.random.default_rng(0).integers(1, 30, 200).tolist(), 1, 16, 17, 32, 33, 100]


def test_an_epoch_of_documents_predicts_every_token_once(tmp_path: Path) -> None:
    files = write_documents(tmp_path, DOCUMENTS)
    made = source(tmp_path, **PACKED, global_batch_size=1, shards=1)
    rows = epoch_of(made, shards=1)
    counted = rows["labels"] != IGNORE
    predicted = Counter(zip(rows["inputs"][counted], rows["labels"][counted], strict=True))
    assert predicted == Counter(pair for tokens in files for pair in pairwise(tokens))
    assert counted.sum() / counted.size > 0.98, "the windows are full"
    left = source(tmp_path, **PACKED, global_batch_size=50)  # windows that fill no update
    assert len(epoch_of(left)["inputs"]) == len(rows["inputs"]) // 50 * 50
    with_others = source(tmp_path, **PACKED | {"documents": False})
    assert made.spec.fingerprint == f"packed-{with_others.spec.fingerprint}"


def test_documents_lie_one_behind_the_other_within_their_window(tmp_path: Path) -> None:
    write_documents(tmp_path, DOCUMENTS)
    made = source(tmp_path, **PACKED)
    several = 0
    for inputs, labels, documents in zip(*epoch_of(made).values(), strict=True):
        for number in range(1, documents.max() + 1):
            (places,) = np.nonzero(documents == number)
            assert (np.diff(places) == 1).all(), "a document is in one piece"
            piece = inputs[places]
            assert (np.diff(piece)[piece[:-1] != 7] == 1).all(), "and its tokens are in order"
            assert np.array_equal(labels[places[:-1]], piece[1:])
            assert 7 not in piece[1:], "one document"
            several += number > 1
        hole = documents == 0
        assert (labels[hole] == IGNORE).all()
        assert (labels[~hole] != IGNORE).all()
    assert several > 50
    assert {*made.eval_sets()["val"].padding(1)} == {"inputs", "labels", "documents"}


def room_left(lengths: np.ndarray, room: int) -> list[int]:
    """Best-fit decreasing, piece by piece; what is left in each window."""
    left: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        if fitting := [value for value in left if value >= length]:
            left.remove(best := min(fitting))
            left.append(best - length)
        else:
            left.append(room - length)
    return sorted(left)


@pytest.mark.parametrize("room", [5, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 10, 300])
def test_pieces_go_where_the_least_room_is_left(room: int, count: int) -> None:
    lengths = np.minimum(room, np.random.default_rng(count).geometric(0.1, count))
    windows = best_fit(lengths, room)
    filled = np.bincount(windows, weights=lengths).astype(int)
    assert sorted((room - filled).tolist()) == room_left(lengths, room)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([], []),
        ([9], []),
        ([9, 9, 9], [(0, 1), (1, 1)]),
        ([1, 2, 9, 1, 2, 3, 4, 5], [(0, 2), (2, 4), (6, 1)]),  # nothing follows the last 5
        ([9, 1, 2, 3, 4, 5, 6, 7, 9], [(0, 4), (4, 4)]),
        ([9, 1, 2, 3, 9, 1], [(0, 4), (4, 1)]),
    ],
)
def test_documents_are_cut_into_pieces(tokens: list[int], pieces: list[tuple[int, int]]) -> None:
    starts, lengths = pieces_of(np.array(tokens, np.uint16), 9, 4)
    assert [*zip(starts.tolist(), lengths.tolist(), strict=True)] == pieces


@pytest.mark.parametrize("begin", [7, 0])
@pytest.mark.parametrize("seq_len", [16, 1000])
@pytest.mark.parametrize("shares", [(0.2, 0.01), (0.05, 0.5)])
def test_a_model_knows_how_many_documents_a_window_has_at_most(
    seq_len: int,
    begin: int,
    shares: tuple[float, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data.language.windows.SCANNED", 40)
    draw = np.random.default_rng(0)
    for name, size, share in zip(("train", "val"), (3000, 500), shares, strict=True):
        tokens = np.where(draw.random(size) < share, begin, draw.integers(8, 2000, size))
        write_npy(tmp_path / f"{name}.npy", tokens.astype(np.uint16))
    keys = PACKED | {"begin_token": begin, "seq_len": seq_len, "global_batch_size": 2}
    made = source(tmp_path, **keys)
    held_out = made.eval_sets()["val"]
    batches = epoch_of(made), everything(held_out), held_out.padding(3)
    most = [max((np.diff(row) != 0).sum() + 1 for row in batch["documents"]) for batch in batches]
    assert max(most) <= made.spec.most_documents <= max(most) + 1
    assert most[2] == 1
    assert source(tmp_path, **keys | {"documents": False}).spec.most_documents == 0


@pytest.mark.parametrize("most", [None, 95])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_held_out_token_is_predicted_once(most: int | None, world_size: int) -> None:
    files = [
        np.arange(size, dtype=np.uint16) + 100 * number
        for number, size in enumerate([50, 0, 1, 17, 60])
    ]
    held_out = HeldOut(Corpus("x", {"val": files}, 1000, ""), 8, most)
    seen: list[int] = []
    for rank in range(world_size):
        for _, batch in eval_batches(held_out, 4, rank, world_size):
            counted = batch["labels"] != IGNORE
            assert (batch["labels"][counted] == batch["inputs"][counted] + 1).all()
            seen += batch["labels"][counted].tolist()
    everything = [token for tokens in files for token in tokens[1:].tolist()]
    assert sorted(seen) == everything[:most]


def test_an_update_and_the_length_in_tokens(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    made = source(tmp_path, global_batch_size=None, tokens_per_update=64, max_tokens=1000)
    assert (made.length.examples_per_update, made.length.total_steps) == (8, 15)
    assert source(tmp_path, max_steps=3, max_tokens=1000).length.total_steps == 3
    assert source(tmp_path, global_batch_size=None).length.examples_per_update == 64


def test_pythons_own_library_at_bytes() -> None:
    made = source(None, documents=True, seq_len=64, max_new_tokens=5, embedded={"mebibytes": 2})
    row = made.train_batch(0, 0)["inputs"][0, 1:]
    assert (made.spec.vocab_size, len(made.spec.token_bytes)) == (257, 257)
    assert sum(made.spec.token_bytes) == 256
    text = bytes(row[row < 256].tolist()).decode(errors="replace")
    assert text.isprintable() or "\n" in text
    held = made.eval_sets()["val"].read(np.arange(2))
    assert (held["inputs"][0, 0], held["inputs"].max()) == (256, 256)
    plain = source(None, embedded={"mebibytes": 2}).spec.fingerprint
    assert made.spec.fingerprint == f"packed-{plain}"
    assert plain != source(None, embedded={"mebibytes": 3}).spec.fingerprint


def test_a_prompt_becomes_text(tmp_path: Path) -> None:
    write_corpus(tmp_path, tokenizer="bytes", begin_token=256)
    made = source(tmp_path, prompt="né", max_new_tokens=3, top_k=4, temperature=0.5)
    row = everything(made.eval_sets()["sample"])
    assert row.pop("inputs").tolist() == [[256, ord("n"), 0xC3, 0xA9]]
    assert {name: (array.dtype.name, array.tolist()) for name, array in row.items()} == {
        "continuation": ("int32", [[0, 0, 0]]),
        "temperature": ("float32", [0.5]),
        "top_k": ("int32", [4]),
        "sample_seed": ("int64", [0]),
    }
    (evaluator,) = made.evaluators("sample")
    assert made.evaluators("val") == []
    batch = {"inputs": torch.tensor([[256, ord("n"), 0xC3, 0xA9]])}
    answer = {"continuation": torch.tensor([[0x1B, 300, ord("e")]], dtype=torch.int32)}
    report = reported(evaluator, (np.array([0]), batch, answer))
    assert (report.text, report.metrics) == ("né�e", {}), "and nothing in it that a terminal obeys"
    assert report.files["sample.txt"] == "né�e\n"
    (item,) = json.loads(report.files["sample.scene.json"])["items"]
    assert item["prompt"] + item["continuation"] == report.text
    assert item["prompt"].startswith("n")
    for keys, names in [
        ({"prompt": "x", "max_new_tokens": 3, "eval_only": True}, ["sample"]),
        ({"max_new_tokens": 3, "eval_only": True}, ["val", "sample"]),
        ({"prompt": "x", "max_new_tokens": 0}, ["val"]),
    ]:
        assert [*source(tmp_path, **keys).eval_sets()] == names
    held_out = source(tmp_path, max_new_tokens=3, seq_len=20).eval_sets()["sample"]
    assert everything(held_out)["inputs"].tolist() == [[*range(10)]]
