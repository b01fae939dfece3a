"""Features: as often there and as large as asked. Texts in which a marker tells what follows it."""

import numpy as np
import pytest

from tests.data.helpers import everything, global_batch, joined
from tests.making import make_source

RUN = {"seed": 3, "shards": 8, "max_steps": 10}
FEATURES = RUN | {"global_batch_size": 4096, "num_features": 7}
TEXTS = RUN | {"global_batch_size": 64, "vocab_size": 6, "seq_len": 9}


@pytest.mark.parametrize(
    ("low", "high", "probability"), [(0.0, 1.0, 0.05), (-1.0, 1.0, 0.01), (2.0, 3.0, 1.0)]
)
def test_features_are_there_as_often_and_as_large_as_asked(
    low: float, high: float, probability: float
) -> None:
    source = make_source("features", **FEATURES, low=low, high=high, probability=probability)
    values = joined(global_batch(source, step, 8) for step in range(4))["inputs"]
    there, expected = values[values != 0], probability * values.size
    assert abs(len(there) - expected) < 4 * expected**0.5 + 1e-9
    assert low <= there.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < there.max() <= high
    assert abs(there.mean() - (low + high) / 2) < 0.05


def test_evaluations_see_fresh_examples_and_each_feature_alone() -> None:
    source = make_source("features", **FEATURES, held_out=100, single=0.5)
    sets = source.eval_sets()
    held_out = everything(sets["features"])
    assert held_out["labels"].tolist() == [0] * 100
    assert not np.array_equal(held_out["inputs"], source.train_batch(0, 0)["inputs"][:100])
    assert np.array_equal(everything(sets["single"])["inputs"], 0.5 * np.eye(7))


def test_the_answer_stood_behind_the_marker() -> None:
    source = make_source("induction", **TEXTS, prefix_window=4)
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
    source = make_source("induction", **TEXTS, held_out=10)
    (texts,) = source.eval_sets().values()
    assert texts.read(np.array([3, 1]))["labels"].tolist() == [[0] * 9] * 2
    fresh, trained = texts.read(np.arange(8))["inputs"], source.train_batch(0, 0)["inputs"]
    assert not np.array_equal(fresh, trained)
    assert source.spec.vocab_size == 8
