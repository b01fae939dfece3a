"""Texts in which a marker tells what follows it at the end, functions of seed, step and shard."""

from __future__ import annotations

import numpy as np
import pytest

from tests.making import make_source
from utils.errors import ConfigError

KEYS = {"seed": 3, "shards": 8, "global_batch_size": 64, "max_steps": 10}
KEYS |= {"vocab_size": 6, "seq_len": 9}


def test_the_answer_stood_behind_the_marker() -> None:
    source = make_source("induction", **KEYS, prefix_window=4)
    batches = [source.train_batch(step, shard) for step in range(4) for shard in range(8)]
    assert all(batch["inputs"].shape == (8, 9) for batch in batches)
    tokens = np.concatenate([batch["inputs"] for batch in batches])
    answer = np.concatenate([batch["answer"] for batch in batches])
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, -1] == 7).all()
    rows, first = np.nonzero(tokens[:, :-1] == 7)
    assert rows.tolist() == list(range(256)), "one marker besides the last token"
    assert {*first.tolist()} == {2, 3, 4}, "anywhere in the window, behind one token"
    assert (tokens[rows, first + 1] == answer).all()
    others = np.delete(tokens[:, 1:-1].ravel(), np.flatnonzero(tokens[:, 1:-1] == 7))
    assert {*others.tolist()} == {*answer.tolist()} == {1, 2, 3, 4, 5, 6}


def test_evaluations_count_all_positions_of_fresh_texts() -> None:
    source = make_source("induction", **KEYS, held_out=10)
    (texts,) = source.eval_sets().values()
    assert texts.read(np.array([3, 1]))["labels"].tolist() == [[0] * 9] * 2
    fresh, trained = texts.read(np.arange(8))["inputs"], source.train_batch(0, 0)["inputs"]
    assert not np.array_equal(fresh, trained)
    assert source.spec.vocab_size == 8


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.prefix_window=7: must be at most 6"):
        make_source("induction", **KEYS, prefix_window=7)
    with pytest.raises(ConfigError, match=r"data_path=x: this data is drawn anew, not read"):
        make_source("induction", **KEYS, data_path="x")
