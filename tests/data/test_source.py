"""Hashes by which a run recognises its data, and errors about malformed batches."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract import IGNORE, Examples, RunLength, RunSettings, Source, Spec
from data.order import EpochSource
from data.source import check_batch, fingerprints_of
from data.stream import read_shards
from tests.data.helpers import global_batch
from tests.runs import FLOAT32
from tests.steps import steps_of, trainer_on
from utils.errors import ConfigError, RunError
from utils.ranks.distributed import Dist

TWO = np.zeros((2, 3))


class MySource(Source):
    """What `train_batch` returns, and the evaluation set, are given."""

    length = RunLength(1, 4)

    def __init__(self, batch: Any = None, **examples: Any) -> None:
        self.spec, self._batch, self.asked = Spec(fingerprint="mine"), batch, list[int]()
        self._examples = examples

    def train_batch(self, step: int, shard: int) -> Any:
        self.asked.append(shard)
        return self._batch(shard) if callable(self._batch) else self._batch or {"inputs": TWO}

    def eval_sets(self) -> Mapping[str, Any]:
        return {name: Examples(each) for name, each in self._examples.items()}


class Stream(MySource):
    cursor = ("row",)


class OneRow(Examples):
    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"inputs": np.zeros(1)}


class Pairs:
    """A dataset as torchvision's are."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return TWO, index


def rows(count: int, first: float = 0.0) -> dict[str, np.ndarray]:
    return {"inputs": np.arange(count) + first, "labels": np.zeros(count)}


def test_a_run_knows_its_first_batch_and_of_each_evaluation_set_the_length_and_first_rows() -> None:
    known = fingerprints_of(MySource(val=rows(20), empty=[]), 5)
    assert [*known] == [
        "the dataset", "the first training batch",
        "the evaluation set val", "the evaluation set empty",
    ]  # fmt: skip
    for changed, part in [
        (MySource({"inputs": TWO + 1}, val=rows(20), empty=[]), "the first training batch"),
        (MySource(val=rows(20, 1), empty=[]), "the evaluation set val"),
        (MySource(val=rows(21), empty=[]), "the evaluation set val"),
    ]:
        now = fingerprints_of(changed, 5)
        assert [name for name in known if now[name] != known[name]] == [part]
    other_order = fingerprints_of(MySource(empty=[], val=rows(20)), 5)
    assert other_order["the evaluation set val"] != known["the evaluation set val"]


def test_every_rank_asks_for_one_shard_but_begins_no_stream_of_another_rank() -> None:
    for source, shard, asked in [(MySource(), 5, [0]), (Stream(), 5, [5]), (MySource(), None, [])]:
        known = fingerprints_of(source, shard)
        assert source.asked == asked
        assert ("the first training batch" in known) == (asked == [0])


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ((TWO, TWO), "returns a tuple; return a dict of arrays, such as inputs and labels"),
        (TWO, "returns an ndarray of shape [2, 3]; return a dict of arrays"),
        ({}, "returns an empty dict; return a dict of arrays"),
        ({"inputs": ["a", "b"]}, "inputs holds str, not numbers; encode it, or leave it out"),
        ({"inputs": np.array([None])}, "inputs holds object, not numbers"),
        ({"inputs": TWO, "labels": 3}, "labels is one number; give every example its"),
        ({"inputs": [[1, 2], [3]]}, "inputs cannot become an array; return numbers, in rows"),
        ({"inputs": TWO, "labels": np.zeros(3)}, "labels has 3 rows, not 2; give every example"),
    ],
)
def test_a_batch_that_is_none_is_one_line(batch: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^my.Source: {re.escape(line)}"):
        check_batch("my.Source", batch)
    with pytest.raises(ConfigError, match=rf"MySource.train_batch: {re.escape(line)}"):
        fingerprints_of(MySource(lambda shard: batch), 0)


RAGGED = [{"inputs": np.zeros(length)} for length in (3, 3, 4)]


@pytest.mark.parametrize(
    ("examples", "line"),
    [
        (OneRow(rows(9)), "MySource.eval_sets: val: inputs has 1 rows, not 8"),
        (rows(9), "MySource.eval_sets: val: is a dict; give contract.Examples"),
        (
            Examples(Pairs()),  # type: ignore[arg-type]
            "Pairs.__getitem__: returns a tuple; return a dict by name",
        ),
        (Examples(RAGGED), "list.__getitem__: inputs has another shape in some examples than in"),
    ],
)
def test_an_evaluation_set_that_is_none_is_one_line(examples: Any, line: str) -> None:
    source = MySource()
    source.eval_sets = lambda: {"val": examples}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=line):
        fingerprints_of(source, 0)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4)])
def test_shards_that_are_not_alike_are_one_line(shape: tuple[int, int]) -> None:
    source = MySource(lambda shard: {"inputs": np.zeros(shape) if shard == 6 else TWO})
    assert read_shards(source, 1, [4, 5])["inputs"].shape == (4, 3)
    line = rf"step 1: shard 6 has inputs of shape \{[*shape]}, and shard 4 inputs of shape \[2, 3"
    with pytest.raises(ConfigError, match=line):
        read_shards(source, 1, [4, 5, 6])


def test_a_map_style_dataset_is_a_source_with_epochs() -> None:
    """As data/README.md says."""
    items = [{"inputs": np.full(3, number), "labels": number} for number in range(20)]
    run = RunSettings(seed=3, shards=4, global_batch_size=20, epochs=2)
    made = EpochSource(run, Spec(), Examples(items), test=Examples(items[:5]))
    assert made.length.total_steps == 2
    assert sorted(global_batch(made, 1, 4)["labels"]) == [*range(20)]
    test = made.eval_sets()["test"]
    assert test.read(np.array([4, 2]))["inputs"].tolist() == [[4] * 3, [2] * 3]
    assert test.padding(2)["labels"].tolist() == [IGNORE] * 2


def test_padding_of_a_regression_is_no_number_that_a_target_may_have() -> None:
    rows = {"inputs": np.ones((3, 2), np.float32), "labels": np.full(3, -100.0, np.float32)}
    padding = Examples(rows).padding(2)
    assert np.isnan(padding["labels"]).all()
    assert padding["inputs"].tolist() == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "inputs",
            np.nan,
            r"step 2: the gradient is .*, nor is the data \(inputs of shard 3\); mend",
        ),
        (
            "labels",
            12,
            r"step 2: Target 12 is out of bounds; labels holds \d .* to 12 \(shard 3\)$",
        ),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_bad_data_in_a_later_step_is_named(
    name: str,
    value: float,
    line: str,
    at_once: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = ["arch=cnn", "data=digits", "optim=adamw", "max_steps=3", "global_batch_size=16"]
    keys += [*FLOAT32, "epochs=null", "eval_interval=null"]
    trainer = trainer_on(Dist(), tmp_path, *keys, f"micro_batch_size={2 * at_once}")
    good = trainer.source.train_batch

    def train_batch(step: int, shard: int) -> Mapping[str, np.ndarray]:
        batch = good(step, shard)
        batch = {"inputs": batch["inputs"] / np.float32(16), "labels": batch["labels"].copy()}
        if (step, shard) == (1, 3):
            batch[name][1] = value
        return batch

    monkeypatch.setattr(trainer.source, "train_batch", train_batch)
    first, second = itertools.islice(steps_of(trainer, 3), 2)
    first()
    trainer.step = 1
    with pytest.raises((RunError, ConfigError), match=line):
        second()
