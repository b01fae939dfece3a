"""Questions with several endings: read from HellaSwag's form, scored as one would by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.language.choices import Choices
from data.stream import eval_batches
from data.tokenizer import Bytes
from tests.making import make_objective
from utils.errors import ConfigError
from utils.spec import IGNORE, Spec

ROWS: list[dict[str, Any]] = [
    {"ctx": "A man sits", "endings": ["on a roof.", "né.", "up"], "label": 1, "ind": 4},
    {"ctx": "The dog" * 20, "endings": ["barks", "is a cat, and sings"], "label": "0"},
    {"ctx": "", "endings": ["a", "b"], "label": 1},
]


def written(folder: Path, rows: list[Any]) -> str:
    path = folder / "choices.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def test_rows_hold_the_question_and_count_the_ending(tmp_path: Path) -> None:
    made = Choices(written(tmp_path, ROWS), Bytes(), 32)
    assert len(made) == 3
    batch = made.read(np.arange(3))
    assert batch["inputs"].shape == (3, 3, 32), "as long as the context, and no longer"
    assert batch["ending_bytes"].tolist() == [[10, 4, 2], [5, 19, 0], [1, 1, 0]]
    assert batch["answer"].tolist() == [1, 0, 1]
    for row, asked in enumerate(ROWS):
        for number, ending in enumerate(asked["endings"]):
            labels = batch["labels"][row, number]
            counted = labels != IGNORE
            assert bytes(labels[counted].tolist()).decode() == f" {ending}"
            last = int(np.flatnonzero(counted)[-1])
            before = [256, *asked["ctx"].encode(), *f" {ending}".encode()][-last - 2 :][:-1]
            assert batch["inputs"][row, number, : last + 1].tolist() == before
    assert (batch["labels"][1:, 2] == IGNORE).all()
    assert (made.padding(2)["answer"] == IGNORE).all()


def test_the_likeliest_ending_is_taken(tmp_path: Path) -> None:
    spec, shape = Spec(vocab_size=257, seq_len=32), {"num_layers": 1, "hidden_size": 16}
    objective = make_objective("gpt", spec, num_heads=2, loss={"chunk_tokens": 40}, **shape)
    net = objective.eval().model
    with torch.no_grad():
        net.lm_head.weight.mul_(30)
    asked = [{**ROWS[0], "label": label} for label in (0, 1, 2)] + ROWS
    made = Choices(written(tmp_path, asked), Bytes(), 32)
    right = {"acc": 0, "acc_norm": 0}
    for row in asked:
        logs = []
        for ending in row["endings"]:
            tokens = [256, *row["ctx"].encode(), *f" {ending}".encode()][-33:]
            with torch.no_grad():
                scores = net.logits(net(torch.tensor([tokens[:-1]])))[0].log_softmax(-1)
            count = len(f" {ending}".encode())
            logs.append(sum(float(scores[at, tokens[at]]) for at in range(-count, 0)))
        sizes = [len(ending.encode()) for ending in row["endings"]]
        right["acc"] += int(np.argmax(logs)) == int(row["label"])
        right["acc_norm"] += int(np.argmax(np.array(logs) / sizes)) == int(row["label"])
    counts = dict.fromkeys(right, 0)
    asked_of = 0
    for _, batch in eval_batches(made, 4):
        with torch.no_grad():
            metrics = objective.predict(batch).metrics
        counts = {name: counts[name] + int(metrics[name][0]) for name in counts}
        asked_of += int(metrics["acc"][1])
    assert (counts, asked_of) == (right, len(asked))


WRONG = [
    ([], "holds no questions"),
    ([{"ctx": "a", "endings": ["b", "c"]}], "line 1: label"),
    ([ROWS[0], {**ROWS[0], "label": 3}], "line 2: label=3: there is no such ending"),
    ([{**ROWS[0], "endings": ["a"]}], "line 1: endings"),
    ([{**ROWS[0], "endings": ["a", ""]}], "line 1: endings.1"),
]


@pytest.mark.parametrize(("rows", "line"), WRONG)
def test_what_is_no_question_is_named(rows: list[Any], line: str, tmp_path: Path) -> None:
    path = written(tmp_path, rows)
    with pytest.raises(ConfigError) as caught:
        Choices(path, Bytes(), 32)
    assert str(caught.value).lower().startswith(f"data.choices={path}: {line}".lower())
