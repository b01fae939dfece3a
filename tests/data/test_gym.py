"""Tasks of reasoning-gym, mostly by a module that stands in for the package."""

import json
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.build import grids
from data.recursive.arc import FIRST
from tests.data.helpers import built, everything, files, reported
from tests.data.recursive.helpers import source
from tests.making import make_source

COUNTS = ("--train", 40, "--test", 12)


class Shifted:
    """Rows of symbols, which an answer may have shifted to the left or to the right."""

    def __init__(self, seed: int, size: int, side: int = 4) -> None:
        if side < 2:
            raise AssertionError("side must be at least 2")
        self.seed, self.size, self.side = seed, size, side

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = Random(self.seed + index)
        grid = [[random.choice("ab_") for _ in range(self.side)] for _ in range(2)]
        answer = "\n".join(" ".join(row[1:] + row[:1]) for row in grid)
        facts = {"source_dataset": type(self).__name__.lower(), "matrix": grid}
        question = f"Shift {grid}."
        return {"question": question, "answer": answer, "metadata": facts}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        right = [row[-1:] + row[:-1] for row in entry["metadata"]["matrix"]]
        return 1.0 if answer in (entry["answer"], "\n".join(map(" ".join, right))) else 0.1


class Other(Shifted):
    pass


class Ruled(Shifted):
    """Of many rules, most of which are seen once."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = super().__getitem__(index)
        entry["metadata"]["task_id"] = f"rule {index % 30}"
        return entry


class Words(Shifted):
    def __getitem__(self, index: int) -> dict[str, Any]:
        random = Random(index)
        answer = "word" * random.randint(1, 4) + f" {index}"
        question = f"Which word follows {answer}?" + " " * random.randint(0, 2)
        return {"question": question, "answer": answer, "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "shifted": Shifted,
        "other": Other,
        "words": Words,
        "ruled": Ruled,
    }

    def create_dataset(name: str, **settings: Any) -> Shifted:
        if name not in kinds:
            raise ValueError(f"Dataset '{name}' not registered")
        return kinds[name](**settings)

    monkeypatch.setitem(
        sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset)
    )


def rows(folder: Path, split: str, name: str = "inputs") -> list[bytes]:
    return [row.tobytes() for row in np.load(folder / split / f"all__{name}.npy")]


@pytest.mark.usefixtures("gym")
def test_instances_differ_and_their_symbols_are_numbered(tmp_path: Path) -> None:
    folder = built(tmp_path / "a", "grids", "--gym", "shifted", *COUNTS)
    train, test = (rows(folder, split) for split in ("train", "test"))
    assert len({*train, *test}) == 52  # of 6,561
    assert json.loads((folder / "gym.json").read_text())["symbols"] == ["_", "a", "b"]
    inputs, labels = (np.load(folder / f"test/all__{name}.npy") for name in ("inputs", "labels"))
    assert {*inputs.flat} == {FIRST, FIRST + 1, FIRST + 2}
    shifted = np.roll(inputs.reshape(12, 2, 4), -1, axis=2).reshape(12, 8)
    assert np.array_equal(labels, shifted)
    assert files(folder) == files(built(tmp_path / "b", "grids", "--gym", "shifted", *COUNTS))
    more = ("--gym", "shifted", "--train", 90, "--test", 12)
    assert rows(built(tmp_path / "c", "grids", *more), "test") == test
    small = ("--gym", "shifted", "--set", '{"side": 2}', "--train", 60, "--test", 12)
    folder = built(tmp_path / "d", "grids", *small)
    assert len({*rows(folder, "train"), *rows(folder, "test")}) == 72  # of 81


@pytest.mark.usefixtures("gym")
def test_several_generators_take_turns_and_have_ids(tmp_path: Path) -> None:
    folder = built(tmp_path / "a", "grids", "--gym", "shifted,other", *COUNTS)
    ids = np.load(folder / "train/all__puzzle_identifiers.npy")
    assert ids.tolist() == [1, 2] * 20
    assert json.loads((folder / "identifiers.json").read_text())[1:] == ["shifted", "other"]


@pytest.mark.usefixtures("gym")
def test_rules_are_puzzles_and_tests_have_those_that_are_trained_on(tmp_path: Path) -> None:
    folder = built(tmp_path / "a", "grids", "--gym", "ruled", "--train", 20, "--test", 25)
    # rules 0 to 24 are tested, 25 to 29 and 0 to 14 trained on
    assert len(rows(folder, "train")) == 20
    assert len(rows(folder, "test")) == 15
    assert len(json.loads((folder / "gym.json").read_text())["places"]["test"]) == 15


@pytest.mark.usefixtures("gym")
def test_an_evaluation_gives_the_share_that_the_scorer_accepts(tmp_path: Path) -> None:
    folder = built(tmp_path / "a", "grids", "--gym", "shifted,other", *COUNTS)
    made = source(folder)
    labels = everything(made.eval_sets()["all"])["labels"]
    # the first four as labelled, the next two shifted the other way, the others not at all
    inputs = everything(made.eval_sets()["all"])["inputs"].reshape(12, 2, 4)
    answers = np.concatenate([labels[:4], np.roll(inputs, 1, axis=2).reshape(12, 8)[4:6], labels])
    answers = answers[:12].copy()
    answers[6:] = FIRST
    (accepted,) = (one for one in made.evaluators("all") if "accepted" in one.scalars)
    order = np.random.default_rng(0).permutation(12)  # as ranks bring them
    report = reported(accepted, (order, {}, {"answer": torch.from_numpy(answers[order])}))
    blank = [not (row != FIRST).any() for row in inputs.reshape(12, 8)]
    expected = (6 + sum(blank[6:])) / 12
    assert report.metrics["accepted"] == pytest.approx(expected)
    assert not [one for one in source(folder, evaluators=[]).evaluators("all") if one.scalars]


@pytest.mark.usefixtures("gym")
def test_a_language_model_is_asked_what_its_dataset_holds_out(tmp_path: Path) -> None:
    words = ("--gym", "words", "--tokenizer", "bytes", *COUNTS)
    folder = built(tmp_path / "a", "tokens", *words)
    assert files(folder) == files(built(tmp_path / "b", "tokens", *words))
    held_out = np.load(folder / "val_000000.npy")
    made = make_source("tokens", data_path=str(folder), seq_len=64, max_steps=1)
    asked = everything(made.eval_sets()["asked"])
    assert asked["inputs"].shape[0] == 12
    prompts = zip(asked["inputs"].tolist(), asked["prompt_length"].tolist(), strict=True)
    texts = "".join(map(chr, held_out)).split(chr(256))[1:]
    for (prompt, length), text in zip(prompts, texts, strict=True):
        assert text.startswith("".join(map(chr, prompt[1:length])))
        assert prompt[length:] == [256] * (len(prompt) - length)
    # what follows the question until the next text is its answer; no other word is accepted
    answers = [text.partition("\n")[2] for text in texts]
    said = np.full((12, max(map(len, answers)) + 1), 256, np.int32)
    for row, answer in zip(said, answers, strict=True):
        row[: len(answer)] = [*map(ord, answer)]
    said[9:, 0] = ord("v")
    (accepted,) = made.evaluators("asked")
    report = reported(accepted, (np.arange(12), {}, {"continuation": torch.from_numpy(said)}))
    assert report.metrics == {"accepted": 0.75}


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--gym none --train 4 --test 2", "--gym none: Dataset 'none' not registered"),
        (
            "--gym words --train 4 --test 2",
            "--gym words: its instances lack two grids up to 30x30; name another",
        ),
        (
            '--gym shifted --set {"side":2} --train 90 --test 9',
            "80 of 446 instances differ and have two grids up to 30x30; ask for fewer",
        ),
        ("--gym shifted --set side --train 4 --test 2", "--set: invalid loads value: 'side'"),
        (
            '--gym shifted --set {"side":1} --train 4 --test 2',
            "--gym shifted: side must be at least",
        ),
        ('--gym shifted --set {"no":1} --train 4 --test 2', "unexpected keyword argument 'no'"),
        ("--gym shifted --train a.jsonl --test 2", "--train a.jsonl: give a number, with --gym"),
    ],
)
def test_what_does_not_fit_is_one_line(
    arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grids.main(["--output-dir", str(tmp_path / "out"), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("gym")
def test_answers_to_other_questions_are_not_scored(tmp_path: Path) -> None:
    folder = built(tmp_path / "a", "grids", "--gym", "shifted", *COUNTS)
    about = json.loads((folder / "gym.json").read_text())
    about["settings"]["seed"] = 1  # as another version might draw
    (folder / "gym.json").write_text(json.dumps(about))
    (accepted,) = (one for one in source(folder).evaluators("all") if one.scalars)
    with pytest.raises(ValueError, match="shifted now asks another question in place 0"):
        reported(accepted, (np.arange(1), {}, {"answer": torch.full((1, 8), FIRST)}))


def test_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    arguments = ["--gym", "x", "--train", "4", "--test", "2", "--output-dir"]
    assert grids.main([*arguments, str(tmp_path / "out")]) == 2
    assert "pip install reasoning-gym" in capsys.readouterr().err


def test_the_package_itself(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    folder = built(tmp_path / "a", "grids", "--gym", "n_queens", "--train", 40, "--test", 10)
    made = source(folder)
    (accepted,) = (one for one in made.evaluators("all") if one.scalars)
    labels = torch.from_numpy(everything(made.eval_sets()["all"])["labels"])
    report = reported(accepted, (np.arange(10), {}, {"answer": labels}))
    assert report.metrics == {"accepted": 1}
