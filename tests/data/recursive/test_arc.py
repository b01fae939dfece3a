"""From ARC tasks to datasets: every image is what its name says, compared cell by cell; what is
wrong is one line.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from contract import IGNORE
from data.recursive.puzzle_text import puzzle_text
from tests.data.recursive.arc_helpers import DIHEDRAL, built, meaning, tokens, write_folder
from tests.data.recursive.helpers import files

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")


def arrays(folder: Path, split: str) -> dict[str, np.ndarray]:
    return {field: np.load(folder / split / f"all__{field}.npy") for field in FIELDS}


def test_every_image_is_what_its_name_says(tmp_path: Path) -> None:
    tasks = write_folder(tmp_path / "train", "abc", 0) | write_folder(
        tmp_path / "test" / "inner", "defg", 1
    )
    given = "--train", tmp_path / "train", "--test", tmp_path / "test", "--num-aug", 30
    folder = built(tmp_path / "out", *given)
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
            pairs = (
                task["test"]
                if split == "test"
                else task["train"]
                + (task["test"] if name in ("task_a", "task_b", "task_c") else [])
            )
            rows = range(found["puzzle_indices"][puzzle], found["puzzle_indices"][puzzle + 1])
            stayed = 0
            for row, pair in zip(rows, pairs, strict=True):
                down, right = (
                    int(side.min()) for side in np.nonzero(found["inputs"][row].reshape(30, 30) > 1)
                )
                for field, side in (("inputs", "input"), ("labels", "output")):
                    grid = DIHEDRAL[symmetry](colours[np.array(pair[side])])
                    assert (found[field][row] == tokens(grid, down, right)).all(), (
                        names[one],
                        field,
                    )
                stayed += not down and not right
                moved += bool(down or right)
            assert stayed >= (1 if split == "train" else len(rows)), (
                "one pair of each puzzle stays, and all that are tested"
            )
            seen.add((split, symmetry, colours[0]))
        assert found["group_indices"].tolist() == list(
            range(0, len(found["puzzle_identifiers"]) + 1, 31)
        )
    assert seen == {(split, symmetry, 0) for split in ("train", "test") for symmetry in range(8)}, (
        "black stays, all else occurs"
    )
    assert moved > 100


def test_contents_never_occur_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_colour = {"input": [[0]], "output": [[3]]}  # of which there are nine, and no symmetries
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "few.json").write_text(
        json.dumps({"train": [one_colour], "test": [one_colour]})
    )
    folder = built(tmp_path / "out", "--train", tmp_path / "in", "--num-aug", 1000)
    assert (
        "1 tasks have fewer than 1000 different augmentations: few; least few: 8"
        in capsys.readouterr().out
    )
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
        given = ("--test", *inputs, "--num-aug", 9, "--seed", seed)
        return built(tmp_path / name, *given)

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
    built(tmp_path / "out", "--test", tmp_path / "in", "--num-aug", 1)
    assert "warning" not in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "new.json").write_text(
        json.dumps({"train": tasks["task_c"]["test"][1:], "test": tasks["task_g"]["test"]})
    )
    built(
        tmp_path / "again", "--test", tmp_path / "in", "--train", tmp_path / "other", "--num-aug", 1
    )
    total = sum(len(task["test"]) for task in tasks.values())
    assert (
        f"warning: 3 of {total} test pairs stand in the training set, too; tasks task_c, task_g"
        in capsys.readouterr().out
    )


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
