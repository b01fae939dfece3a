"""Texts in which a marker tells what follows it at the end, functions of seed, step and shard."""

from __future__ import annotations

import numpy as np

from tests.data.helpers import global_batch, joined
from tests.making import make_source

KEYS = {"seed": 3, "shards": 8, "global_batch_size": 64, "max_steps": 10}
KEYS |= {"vocab_size": 6, "seq_len": 9}


def test_the_answer_stood_behind_the_marker() -> None:
    source = make_source("induction", **KEYS, prefix_window=4)
    tokens, answer = joined(global_batch(source, step, 8) for step in range(4)).values()
    assert tokens.shape == (256, 9)
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
