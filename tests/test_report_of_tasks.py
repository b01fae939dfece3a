"""The report page of a small real run of every task, looked at by a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.build import maze
from tests.browser import opened, take_picture
from tests.data.helpers import built
from tests.data.recursive.arc_helpers import write_folder
from tests.runs import TINY_CNN, TINY_COMPONENTS, TINY_GPT, TINY_TRM, train

OWN_DATA = [argument for argument in TINY_TRM if not argument.startswith("data.embedded")]
BY_STEP = ["Accuracy by thinking step", "Cells fixed and broken by step", "Halting steps"]
SCENES = {
    "sudoku": ["Boards, cell by cell", *BY_STEP],
    "maze": ["Mazes, cell by cell", *BY_STEP],
    "arc": ["ARC test pairs", *BY_STEP],
    "digits": ["Confusion matrix", "Misclassified images"],
    "text": ["A continuation"],
    "decomposition": [
        "The most needed components", "Gates by input feature and component",
    ],
}  # fmt: skip


def arguments(task: str, folder: Path, request: pytest.FixtureRequest) -> list[str]:
    """A run of the task, with data made in this folder."""
    short = ["max_steps=8", "eval_every_steps=4", "report=true"]
    match task:
        case "sudoku":
            return [*TINY_TRM, *short]
        case "maze":
            made = ["--size", "6", "--min-path", "8", "--train", "40", "--test", "8"]
            assert maze.main([*made, "--output-dir", str(folder / "data")]) == 0
            return [*OWN_DATA, *short, f"data_path={folder / 'data'}"]
        case "arc":
            for name, seed in (("train", 1), ("test", 2)):
                write_folder(folder / name, "ab" if name == "train" else "c", seed, most=8)
            both = ["--train", folder / "train", "--test", folder / "test", "--num-aug", 2]
            path = built(folder / "data", "arc", *both)
            quick = ["max_steps=2", "eval_every_steps=1", "global_batch_size=8", "log_interval=1"]
            quick += ["arch.halt_max_steps=2", "arch.forward_dtype=float32", "report=true"]
            return [*OWN_DATA, *quick, f"data_path={path}", "evaluators=[arc]"]
        case "digits":
            return [*TINY_CNN, *short]
        case "text":
            return [*TINY_GPT, *short]
    return [*TINY_COMPONENTS, *short, f"arch.target={request.getfixturevalue('tms_target')}"]


@pytest.mark.slow
@pytest.mark.parametrize("task", SCENES)
def test_the_page_of_a_task(
    task: str, browser: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = train(tmp_path / "run", *arguments(task, tmp_path, request))
    for width, dark in ((1280, False), (390, True)):
        with opened(browser, width, dark) as window:
            page = window.open(run.directory / "report.html")
            window.check(width)
            assert page.locator(".panel.scene h3").all_inner_texts() == SCENES[task]
            assert page.locator("#curves .curve").count() > 1
            assert page.locator("header .state").inner_text() == "finished"
    if task == "sudoku":
        take_picture(browser, run.directory, tmp_path / "picture.png")
