"""An ARC task of the user's own: its images, what is said of answers, and input that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.recursive.own_arc import ArcAnswer, OwnTask
from data.recursive.puzzle_files import PuzzleSplit, read_split
from data.recursive.puzzle_pool import Member
from tests.data.recursive.arc_helpers import built, write_folder
from tests.making import make_source
from utils.errors import ConfigError
from utils.measure.evaluator import Prediction, Report

IMAGES = 6


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "raw"
    write_folder(folder, "xyz", seed=4, most=9)
    return folder


@pytest.fixture(scope="module")
def folder(raw: Path) -> Path:
    return built(raw.parent / "set", "--test", raw, "--num-aug", 20)


@pytest.fixture
def split(folder: Path) -> PuzzleSplit:
    return read_split("data_path=x", folder, "test")


def asked(split: PuzzleSplit, name: str, task: OwnTask) -> tuple[np.ndarray, np.ndarray]:
    """Returns the dataset's inputs and right answers for the ids of a task's images, in the same
    order.
    """
    puzzles = split.sets["all"]
    rows = task.read(np.arange(len(task)))["puzzle_identifiers"]
    place = {int(one): number for number, one in enumerate(puzzles.puzzle_identifiers)}
    pairs = len(task) // task.images
    found = [
        puzzles.puzzle_indices[place[int(one)]] + number // task.images
        for number, one in enumerate(rows)
    ]
    assert len(task) == pairs * IMAGES
    return puzzles.inputs.take(found, axis=0), puzzles.labels.take(found, axis=0)


def answered(task: OwnTask, answers: np.ndarray, q: float = 2.0) -> Report:
    """Evaluated by two ranks, in batches with padding."""
    rows = []
    for rank in range(2):
        made = ArcAnswer(task)
        for start in range(4 * rank, len(task), 8):
            indices = np.arange(start, min(start + 4, len(task)))
            outputs = np.concatenate([answers[indices], np.zeros((2, 900), answers.dtype)]).astype(
                np.int64
            )
            made.add(
                indices,
                {},
                Prediction(
                    {},
                    {
                        "answer": torch.from_numpy(outputs),
                        "q_halt_logits": torch.full((len(outputs),), q),
                    },
                ),
            )
        rows.append(made.rows())
    return ArcAnswer(task).report(
        {name: torch.cat([one[name] for one in rows if one]) for name in rows[0]}
    )


def test_images_are_those_of_the_dataset_and_answers_are_mapped_back(
    raw: Path, split: PuzzleSplit
) -> None:
    for name in ("task_x", "task_y", "task_z"):
        task = OwnTask(str(raw / f"{name}.json"), [Member(split)], IMAGES)
        inputs, labels = asked(split, name, task)
        assert np.array_equal(task.read(np.arange(len(task)))["inputs"], inputs)
        report = answered(task, labels)
        pairs = json.loads((raw / f"{name}.json").read_text())["test"]
        assert json.loads(report.files["answer.json"]) == {name: [pair["output"] for pair in pairs]}
        assert report.text.count("correct\n6 of 6 images agree, confidence 88.1%") == len(pairs)
        assert f"{name}, test pair 1" in report.text.split("\n")
        shown = json.loads(report.files["arc.scene.json"])["pairs"]
        assert [pair["answers"][0]["grid"] for pair in shown] == [
            ["".join(map(str, row)) for row in pair["output"]] for pair in pairs
        ]


def test_a_task_of_the_second_of_two_datasets_has_its_ids(
    raw: Path, split: PuzzleSplit, tmp_path: Path
) -> None:
    write_folder(tmp_path / "raw", "pq", seed=1, most=9)
    other = read_split(
        "data_path=x", built(tmp_path / "set", "--test", tmp_path / "raw", "--num-aug", 3), "test"
    )
    alone, second = (
        OwnTask(str(raw / "task_y.json"), members, IMAGES)
        for members in ([Member(split)], [Member(other), Member(split, 100)])
    )
    everything = np.arange(len(alone))
    assert np.array_equal(
        second.read(everything)["puzzle_identifiers"],
        alone.read(everything)["puzzle_identifiers"] + 100,
    )


def test_wrong_answers_stand_beside_the_right_ones_and_the_majority_counts(
    raw: Path, split: PuzzleSplit
) -> None:
    task = OwnTask(str(raw / "task_x.json"), [Member(split)], IMAGES)
    _, labels = asked(split, "task_x", task)
    two_wrong = labels.copy()
    two_wrong[[0, 3]] = 0
    assert "correct\n4 of 6 images agree" in answered(task, two_wrong).text
    all_wrong = np.zeros_like(labels)
    all_wrong[:, 0] = 2 + task.augmentations.colours[:, 7]
    text = answered(task, all_wrong).text
    assert "wrong\n6 of 6 images agree" in text
    assert text.split("\n")[1].split() == ["puzzle", "answer", "right"]
    assert text.split("\n")[2].split()[1] == "7"


def test_without_outputs_nothing_is_judged(raw: Path, folder: Path, tmp_path: Path) -> None:
    given = json.loads((raw / "task_y.json").read_text())["test"]
    typed = {"test": [{"input": pair["input"]} for pair in given]}
    (tmp_path / "task_y.json").write_text(json.dumps(typed))
    source = make_source(
        "puzzles",
        seed=0,
        shards=1,
        global_batch_size=8,
        epochs=1,
        data_path=str(folder),
        eval_only=True,
        puzzle=str(tmp_path / "task_y.json"),
        votes=IMAGES,
    )
    (task,) = source.eval_sets().values()
    (shown,) = source.evaluators("puzzle")
    assert isinstance(task, OwnTask)
    assert isinstance(shown, ArcAnswer)
    assert shown.report({}) == Report()
    text = answered(task, np.zeros((len(task), 900), np.uint8)).text
    assert "correct" not in text
    assert "wrong" not in text
    assert text.count("6 of 6 images agree") == len(given)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("task_x", "{"),
        ("task_x", "[]"),
        ("task_x", '{"train": []}'),
        ("task_x", '{"test": [{"input": [[1, 2], [3]]}]}'),
        ("task_x", '{"test": [{"input": [[11]]}]}'),
        ("task_x", '{"test": [{"input": [[1]], "output": [[]]}]}'),
        ("task_q", '{"test": [{"input": [[1]]}]}'),
    ],
)
def test_wrong_tasks_are_one_line(
    name: str, content: str, split: PuzzleSplit, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        OwnTask(str(tmp_path / f"{name}.json"), [Member(split)], IMAGES)
    assert "\n" not in str(caught.value)
    assert str(tmp_path)[:40] in str(caught.value)
