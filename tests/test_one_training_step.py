"""docs/one-training-step.md names the files of a step; a profile says whether it is right."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.ranks import ROOT
from tests.runs import FLOAT32
from tests.steps import steps_of, trainer_on
from utils.ranks.distributed import Dist

PAGE = ROOT / "docs" / "one-training-step.md"
EARLIER = 3  # steps: the first ones build buffers


def files_of_a_step(folder: Path, recipe: str) -> set[Path]:
    """The files of this repository that a step calls functions of."""
    files: set[Path] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and ".venv" not in file.parts:
            files.add(file)

    trainer = trainer_on(Dist(), folder, f"experiment={recipe}", *FLOAT32, "max_steps=20")
    for take in steps_of(trainer, EARLIER + 1):
        if trainer.step == EARLIER:
            sys.setprofile(look)
        try:
            take()
        finally:
            sys.setprofile(None)
    # a step of `tests.steps` asks no checkpointer
    return files - {Path(__file__), ROOT / "tests/steps.py"} | {ROOT / "utils/checkpoint/policy.py"}


@pytest.mark.parametrize(
    ("recipe", "says"),
    [("digits", r"digits goes\s+through (\d+)"), ("demo", r"below through (\d+)")],
)
def test_the_page_names_every_file_of_a_step(recipe: str, says: str, tmp_path: Path) -> None:
    text = PAGE.read_text()
    linked = {(PAGE.parent / link).resolve() for link in re.findall(r"\]\((\.\.[^)]+\.py)\)", text)}
    files = files_of_a_step(tmp_path / "run", recipe)
    assert sorted(map(str, files - linked)) == []
    (number,) = re.findall(says, text)
    assert len(files) == int(number)
