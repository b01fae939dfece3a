"""The laws of every source: batches are functions of seed, step and shard, shards cut one global
batch, and each example of an evaluation is read once.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract import IGNORE, Arrays
from data.source import fingerprints_of
from data.stream import eval_batches
from tests.data.helpers import everything, joined
from tests.data.language.token_helpers import write_corpus
from tests.data.recursive.helpers import ragged_groups, write_dataset
from tests.making import make_source

BATCH = 24
EPOCHS, STEPS = {"epochs": 9}, {"max_steps": 9}
DOCUMENTS = {"documents": True, "begin_token": 50}
READERS = {"readers": ["reader_0", "reader_1"]}
SHORT = {"val_passages": 50, "embedded": {"mebibytes": 1, "bpe": None}}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits", EPOCHS),
    "boards": ("puzzles", EPOCHS | {"embedded": {"size": 4, "train": 40, "test": 9, "blanks": 7}}),
    "ragged": ("puzzles", EPOCHS | {"data_path": "ragged"}),
    "tokens": ("tokens", STEPS | {"data_path": "tokens", "seq_len": 8}),
    "documents": ("tokens", STEPS | {"data_path": "tokens", "seq_len": 8} | DOCUMENTS),
    "features": ("features", STEPS | {"held_out": 50}),
    "passages": ("passages", EPOCHS | READERS | {"passage_len": 6, "gap": 1, "text": 4} | SHORT),
    "facts": ("facts", STEPS | READERS | {"facts": 1, "asked": 1, "held_out": 50}),
    "fact_text": ("fact_text", STEPS | {"seq_len": 32, "facts": 3, "asked": 2, "held_out": 50}),
    "induction": ("induction", STEPS | {"held_out": 50, "seq_len": 9}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, readers: str) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number, path in enumerate(readers.strip("[]").split(",")):
        (folder / f"reader_{number}").symlink_to(path)
    write_corpus(folder / "tokens")
    write_dataset(folder / "ragged", ragged_groups(30))
    write_dataset(folder / "ragged", [[2], [1], [3]] * 9, "test")
    return folder


def made(name: str, folders: Path, **more: Any) -> Any:
    choice, keys = SOURCES[name]
    if "data_path" in keys:
        keys = keys | {"data_path": str(folders / keys["data_path"])}
    if "readers" in keys:
        keys = keys | {"readers": [str(folders / name) for name in keys["readers"]]}
    return make_source(choice, **{"seed": 3, "shards": 4, "global_batch_size": BATCH} | keys | more)


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", SOURCES)
def test_batches_are_functions_of_seed_step_and_shard(name: str, folders: Path) -> None:
    one, again, whole = (made(name, folders, shards=shards) for shards in (4, 4, 1))
    assert one.spec == again.spec
    there = {(step, shard): one.train_batch(step, shard) for step in range(6) for shard in range(4)}
    np.random.seed(0)  # noqa: NPY002  the global state must not matter
    for (step, shard), batch in reversed(there.items()):
        assert equal(again.train_batch(step, shard), batch)
        assert {len(rows) for rows in batch.values()} == {BATCH // 4}
    for step in range(6):
        assert equal(joined(there[step, shard] for shard in range(4)), whole.train_batch(step, 0))
    assert not equal(there[0, 0], there[1, 0])
    assert not equal(there[0, 0], made(name, folders, seed=4).train_batch(0, 0))


@pytest.mark.parametrize("name", SOURCES)
def test_a_longer_run_is_on_the_same_data(name: str, folders: Path) -> None:
    one = fingerprints_of(made(name, folders), 0)
    for longer in ({"epochs": 18}, {"eval_every_steps": 3}, {"max_steps": 99}):
        if SOURCES[name][1].get("epochs") or "epochs" not in longer:
            assert fingerprints_of(made(name, folders, **longer), 0) == one
    assert fingerprints_of(made(name, folders, seed=4), 0) != one


@pytest.mark.parametrize("name", SOURCES)
def test_each_example_of_an_evaluation_is_read_once(name: str, folders: Path) -> None:
    for examples in made(name, folders).eval_sets().values():
        whole = everything(examples)
        for ranks, most in ((1, None), (3, None), (2, 5)):
            parts = (eval_batches(examples, 4, rank, ranks, most) for rank in range(ranks))
            read = [*chain(*parts)]
            indices = np.concatenate([indices for indices, _ in read])
            assert sorted(indices) == [*range(min(len(examples), most or len(examples)))]
            for indices, batch in read:
                for key, rows in whole.items():
                    assert np.array_equal(batch[key][: len(indices)], rows[indices])
                labels = [rows for key, rows in batch.items() if key.startswith("labels")]
                assert labels
                assert all((rows[len(indices) :] == IGNORE).all() for rows in labels)
