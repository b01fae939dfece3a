"""Votes over augmentations: TRM's own numbers, a plain reference, and the same whoever counted in
whatever order.
"""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract import Prediction, Report
from data.recursive.arc_votes import PASSES, ArcPairs, ArcVotes
from data.recursive.puzzle_files import ARRAYS, PuzzleSplit, read_split
from tests.data.helpers import built
from tests.data.recursive.arc_helpers import DIHEDRAL, answers, meaning, write_folder
from tests.data.recursive.helpers import source, write_dataset
from tests.ranks import ROOT
from tests.runs import QUIET, train
from utils.errors import ConfigError

GOLDEN = ROOT / "tests" / "golden" / "arc_votes.npz"
BATCH = 16


def test_what_trms_evaluator_makes_of_the_same_answers(tmp_path: Path) -> None:
    golden = np.load(GOLDEN)
    recorded = json.loads(golden["meta"].tobytes())
    size = {"vocab_size": 12, "seq_len": 900, "num_puzzle_identifiers": 200}
    write_dataset(tmp_path, [[1]], "test", **size)
    for field in ARRAYS:
        np.save(tmp_path / "test" / f"all__{field}.npy", golden[field])
    (tmp_path / "identifiers.json").write_bytes(golden["identifiers"].tobytes())
    split = read_split("data_path=x", tmp_path, "test")
    report = voted(split, golden["answers"], golden["q"])
    passes = {name: value for name, value in report.metrics.items() if name.startswith("pass")}
    assert {f"ARC/{name}": passes[name] for name in passes} == pytest.approx(recorded["metrics"])
    assert json.loads(report.files["submission.json"]) == recorded["submission"]


def voted(split: PuzzleSplit, answers: np.ndarray, q: np.ndarray, *ranks: np.ndarray) -> Report:
    """The report on what these ranks have evaluated in batches, the last one padded."""
    pairs, found = ArcPairs(split, "all"), []
    for examples in ranks or [np.arange(len(q))]:
        counted = ArcVotes(pairs)
        for start in range(0, len(examples), BATCH):
            indices = examples[start : start + BATCH]
            padded = np.resize(indices, BATCH)
            outputs = {
                "answer": torch.from_numpy(answers[padded].astype(np.int64)),
                "q_halt_logits": torch.from_numpy(q[padded]),
            }
            counted.add(indices, {}, Prediction({}, outputs))
        if rows := counted.rows():
            found.append(rows)
    return ArcVotes(pairs).report(
        {name: torch.cat([rows[name] for rows in found]) for name in found[0]}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("votes")
    write_folder(scratch / "in", "pqrstuv", 5, 9)
    return built(scratch / "set", "arc", "--test", scratch / "in", "--num-aug", 20)


def reference(folder: Path, answers: np.ndarray, q: np.ndarray) -> dict[str, float]:
    """Grid by grid, as one would explain it; votes and confidences must decide alone."""
    identifiers = json.loads((folder / "identifiers.json").read_text())
    puzzles = json.loads((folder / "test_puzzles.json").read_text())
    votes: dict = defaultdict(lambda: defaultdict(list))
    row = 0
    for one in np.load(folder / "test" / "all__puzzle_identifiers.npy"):
        name, symmetry, colours = meaning(identifiers[one])
        for number in range(len(puzzles[name]["test"])):
            canvas = answers[row].reshape(30, 30)
            sizes, w = [(0, 0)], 30
            for h, line in enumerate((canvas >= 2) & (canvas <= 11), 1):
                w = min(w, [*line, False].index(False))
                sizes.append((h, w))
            h, w = max(sizes, key=lambda size: size[0] * size[1])
            grid = DIHEDRAL[{1: 3, 3: 1}.get(symmetry, symmetry)](canvas[:h, :w])
            plain = str(np.argsort(colours)[grid.astype(int) - 2].tolist())
            votes[name, number][plain].append(1 / (1 + np.exp(-float(q[row]))))
            row += 1
    metrics = {}
    for k in PASSES:
        solved: dict[str, list[bool]] = defaultdict(list)  # of each puzzle
        for (name, number), found in votes.items():
            ranked = sorted(found, key=lambda grid: (-len(found[grid]), -np.mean(found[grid])))
            solved[name].append(str(puzzles[name]["test"][number]["output"]) in ranked[:k])
        metrics[f"pass@{k}"] = float(np.mean([np.mean(each) for each in solved.values()]))
        metrics[f"pair_pass@{k}"] = float(np.mean([*chain(*solved.values())]))
        metrics[f"whole_pass@{k}"] = float(np.mean([all(each) for each in solved.values()]))
    return metrics


def test_a_plain_reference_and_any_ranks_and_batches(folder: Path, tmp_path: Path) -> None:
    split = read_split("data_path=x", folder, "test")
    given, q = answers(folder, 6)
    alone = voted(split, given, q)
    assert alone.metrics == pytest.approx(reference(folder, given, q))
    shutil.copytree(folder, hrm := tmp_path / "hrm")  # whose names have another form
    names = (folder / "identifiers.json").read_text().replace("|||", "_")
    (hrm / "identifiers.json").write_text(names)
    assert voted(read_split("data_path=x", hrm, "test"), given, q) == alone
    first, second = (alone.metrics[f"pass@{k}"] for k in (1, 2))
    votes = np.load(BytesIO(alone.files["arc_votes.npz"]))  # type: ignore[arg-type]
    pairs, grids = votes["pair"].tolist(), votes["grid"]
    answered = {(pair, grid.tobytes()) for pair, grid in zip(pairs, grids, strict=True)}
    assert votes["votes"].sum() == len(q) > len(votes["votes"]) == len(answered)
    assert votes["confidence"].sum() == pytest.approx((1 / (1 + np.exp(-q.astype(float)))).sum())
    assert alone.line == f"pass@1 {first:.4f}  pass@2 {second:.4f}"
    assert set(alone.metrics) == set(ArcVotes(ArcPairs(split, "all")).scalars)
    assert len(set(alone.metrics.values())) > 6, "the answers are neither all right nor all wrong"
    tasks = json.loads((folder / "test_puzzles.json").read_text())
    shown = json.loads(alone.files["arc.scene.json"])["pairs"]
    submission = json.loads(alone.files["submission.json"])
    right = []
    for pair in shown:
        name, _, number = pair["name"].partition(", pair ")
        place = int(number or 1) - 1
        task, tried = tasks[name]["test"][place], submission[name][place]
        as_lines = {key: ["".join(map(str, row)) for row in task[key]] for key in task}
        assert (pair["input"], pair["truth"]) == (as_lines["input"], as_lines["output"])
        assert [answer["grid"] for answer in pair["answers"]] == [
            ["".join(map(str, row)) for row in grid] for grid in tried.values()
        ]
        assert pair["votes"] == 21 >= sum(answer["votes"] for answer in pair["answers"])
        right.append(any(answer["right"] for answer in pair["answers"]))
        assert right[-1] == (task["output"] in tried.values())
    assert right == [True, False] * (len(right) // 2), "both sorts, in turn"
    q[:] = q[0]  # all ties, too
    alone = voted(split, given, q)
    for seed, ranks in ((0, 2), (1, 3)):
        parts = np.array_split(np.random.default_rng(seed).permutation(len(q)), ranks)
        assert voted(split, given, q, *parts, np.arange(0)) == alone


def test_sets_that_lack_what_votes_need_are_refused(folder: Path, tmp_path: Path) -> None:
    split = read_split("data_path=x", folder, "test")
    boards = {"size": 4, "train": 40, "test": 9, "blanks": 3}
    with pytest.raises(ConfigError, match=r"^evaluators=\[arc\]: data.embedded/all holds no ARC"):
        source(evaluators=["arc"], embedded=boards)
    identifiers = (folder / "identifiers.json").read_text()
    first = json.loads(identifiers)[1]
    for text, line in [
        (None, "identifiers.json: No such file or directory; build the dataset again"),
        ('["<blank>"]', "names no puzzle"),
        (identifiers.replace(f'"{first}"', f'"{first}|||t0|||0123456789"'), "not have each puzzle"),
        (identifiers.replace("|||t1|||0", "|||t1|||1", 1), "does not map ten colours to ten"),
    ]:
        if text is not None:
            (tmp_path / "identifiers.json").write_text(text)
        with pytest.raises(ConfigError, match=line):
            ArcPairs(replace(split, folder=tmp_path), "all")


def test_arc_is_scored_unless_the_user_says_otherwise(folder: Path, tmp_path: Path) -> None:
    """As in TRM, whose launch lines for ARC name no evaluator."""

    def scores(data: Path, **more: Any) -> bool:
        return ArcVotes in [type(one) for one in source(data, **more).evaluators("all")]

    assert scores(folder)
    assert not scores(folder, evaluators=[])
    nameless = tmp_path / "set"
    shutil.copytree(folder, nameless)
    (nameless / "identifiers.json").unlink()
    assert not scores(nameless)  # HRM's own builder writes no names
    with pytest.raises(ConfigError, match=r"identifiers.json: No such file"):
        scores(nameless, evaluators=["arc"])


@pytest.mark.slow
def test_a_run_leaves_a_submission(folder: Path, tmp_path: Path) -> None:
    small = [
        "arch=trm", "arch.hidden_size=16", "arch.num_heads=1", "arch.L_layers=1", "arch.H_cycles=1",
        "arch.L_cycles=1", "arch.halt_max_steps=1", "arch.puzzle_emb_len=1",
        "evaluators=[{name:arc@ARC}]", "global_batch_size=8", "max_steps=3", "eval_every_steps=1",
    ]  # fmt: skip
    tiny = built(tmp_path / "set", "arc", "--test", folder.parent / "in", "--num-aug", 1)
    result = train(tmp_path / "run", *small, f"data_path={tiny}", *QUIET)
    evaluations = result.directory / "evaluations"
    examples = len(np.load(tiny / "test" / "all__inputs.npy"))
    for step in (1, 2, 3):
        votes = np.load(evaluations / f"step_{step}/all/arc_votes.npz")["votes"]
        assert votes.sum() == examples
    submission = evaluations / "step_3/all/submission.json"
    puzzles = json.loads((tiny / "test_puzzles.json").read_text())
    for name, attempts in json.loads(submission.read_text()).items():
        assert len(attempts) == len(puzzles.pop(name)["test"])
        assert all(one.keys() == {"attempt_1", "attempt_2"} for one in attempts)
    assert not puzzles
    assert result.rows[-1]["eval/pass@1000"] == 0
