"""From ARC tasks to datasets: every image is what its name says, compared cell by cell; what is
wrong is one line.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from contract import IGNORE
from data.recursive.puzzle_files import ARRAYS
from data.recursive.puzzle_text import puzzle_text
from tests.data.helpers import built, files
from tests.data.recursive.arc_helpers import DIHEDRAL, meaning, tokens, write_folder


def arrays(folder: Path, split: str) -> dict[str, np.ndarray]:
    return {field: np.load(folder / split / f"all__{field}.npy") for field in ARRAYS}


def test_every_image_is_what_its_name_says(tmp_path: Path) -> None:
    train, test = tmp_path / "train", tmp_path / "test"
    trained = write_folder(train, "abc", 0)
    tasks = trained | write_folder(test / "inner", "defg", 1)
    folder = built(tmp_path / "out", "arc", "--train", train, "--test", test, "--num-aug", 30)
    names = json.loads((folder / "identifiers.json").read_text())
    assert names[0] == "<blank>"
    assert len(set(names)) == len(names) == 1 + 7 * 31
    assert json.loads((folder / "test_puzzles.json").read_text()) == {
        f"task_{name}": tasks[f"task_{name}"] for name in "defg"
    }
    seen, moved = set(), 0
    for split in ("train", "test"):
        found = arrays(folder, split)
        for puzzle, one in enumerate(found["puzzle_identifiers"]):
            name, symmetry, colours = meaning(names[one])
            task = tasks[name]
            pairs = task["test"] if name in trained or split == "test" else []
            if split == "train":
                pairs = task["train"] + pairs
            rows = range(found["puzzle_indices"][puzzle], found["puzzle_indices"][puzzle + 1])
            stayed = 0
            for row, pair in zip(rows, pairs, strict=True):
                canvas = found["inputs"][row].reshape(30, 30)
                down, right = (int(side.min()) for side in np.nonzero(canvas > 1))
                for field, side in (("inputs", "input"), ("labels", "output")):
                    expected = tokens(
                        DIHEDRAL[symmetry](colours[np.array(pair[side])]), down, right
                    )
                    assert (found[field][row] == expected).all(), (names[one], field)
                stayed += not down and not right
            moved += len(rows) - stayed
            assert stayed >= (1 if split == "train" else len(rows)), (
                "one pair of each puzzle stays, and all that are tested"
            )
            seen.add((split, symmetry, colours[0]))
        puzzles = len(found["puzzle_identifiers"])
        assert found["group_indices"].tolist() == [*range(0, puzzles + 1, 31)]
    assert seen == {*product(("train", "test"), range(8), [0])}, "black stays, all else occurs"
    assert moved > 100


def test_contents_never_occur_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_colour = {"input": [[0]], "output": [[3]]}  # of which there are nine, and no symmetries
    (tmp_path / "in").mkdir()
    task = json.dumps({"train": [one_colour], "test": [one_colour]})
    (tmp_path / "in" / "few.json").write_text(task)
    folder = built(tmp_path / "out", "arc", "--train", tmp_path / "in", "--num-aug", 1000)
    line = "1 tasks have fewer than 1000 different augmentations: few; least few: 8"
    assert line in capsys.readouterr().out
    labels = arrays(folder, "train")["labels"]
    assert sorted(labels.max(1)) == sorted([*range(3, 12)] * 2)


def test_same_seed_same_bytes_whatever_the_form_and_ids_stay(tmp_path: Path) -> None:
    tasks = write_folder(tmp_path / "in", "abc", 0)
    write_folder(tmp_path / "more", "xyz", 1)
    solutions = {name: [pair["output"] for pair in task["test"]] for name, task in tasks.items()}
    challenges = {
        name: task | {"test": [{"input": pair["input"]} for pair in task["test"]]}
        for name, task in tasks.items()
    }
    (tmp_path / "k_challenges.json").write_text(json.dumps(challenges))
    (tmp_path / "k_solutions.json").write_text(json.dumps(solutions))

    def make(name: str, seed: int, *inputs: object) -> Path:
        return built(tmp_path / name, "arc", "--test", *inputs, "--num-aug", 9, "--seed", seed)

    first = files(make("1", 1, tmp_path / "in"))
    assert files(make("2", 1, tmp_path / "k")) == first
    assert files(make("3", 1, tmp_path / "k_challenges.json", tmp_path / "in")) == first
    assert files(make("4", 2, tmp_path / "in")) != first
    longer = make("5", 1, tmp_path / "in", "--train", tmp_path / "more")
    names = json.loads(first["identifiers.json"])
    assert json.loads((longer / "identifiers.json").read_text())[: len(names)] == names
    rows = np.load(tmp_path / "1" / "train" / "all__inputs.npy")
    assert (arrays(longer, "train")["inputs"][: len(rows)] == rows).all()


def test_test_pairs_that_are_trained_on_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_folder(tmp_path / "in", "abcdefgh", 0)
    tested = "arc", "--test", tmp_path / "in", "--num-aug", 1
    built(tmp_path / "out", *tested)
    assert "warning" not in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    other = {"train": tasks["task_c"]["test"][1:], "test": tasks["task_g"]["test"]}
    (tmp_path / "other" / "new.json").write_text(json.dumps(other))
    built(tmp_path / "again", *tested, "--train", tmp_path / "other")
    total = sum(len(task["test"]) for task in tasks.values())
    line = f"warning: 3 of {total} test pairs are also in the training set; tasks task_c, task_g"
    assert line in capsys.readouterr().out


def test_grids_are_shown_without_what_is_around_them() -> None:
    given, answer = np.array([[0, 9]]), np.array([[1, 3], [2, 4], [5, 5]])
    labels = tokens(np.array([[1], [2]])).astype(int)
    labels[labels == 0] = IGNORE
    lines = [
        "puzzle    answer    right",
        "09        13        1",
        "          24        2",
        "          55",
        "wrong: 3 of 5 cells",
    ]
    assert puzzle_text(tokens(given), labels, tokens(answer), 12).split("\n") == lines
