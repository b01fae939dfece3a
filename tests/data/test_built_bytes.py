"""Builders make the bytes that they have always made: runs resume only with the same data."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

import pytest

from tests.data.recursive.arc_helpers import write_folder

RECORDED = {
    "sudoku --size 9 --train 24 --test 8 --num-aug 2": "d0bae7d3bb0c890e",
    "sudoku --size 9 --blanks 56 --min-guesses 1 --train 10 --test 4": "760b1e4fcc99a099",
    "maze --size 10 --min-path 16 --train 20 --test 8 --augment": "6dda0199b1664d8e",
    "arc --train {folder}/in --num-aug 9": "e0e0cc30d97cb1c4",
    "tokens --input {folder}/in/task_a.json --tokenizer bytes": "4aa2805eb64c1aee",
}


@pytest.mark.parametrize("command", RECORDED)
def test_a_dataset_has_the_recorded_digest(command: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "ab", 0)
    builder, *arguments = command.replace("{folder}", str(tmp_path)).split()
    main = import_module(f"data.build.{builder}").main
    assert main([*arguments, "--output-dir", str(tmp_path / "out")]) == 0
    files = [path for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()]
    content = b"".join(file.read_bytes() for file in files)
    assert hashlib.sha256(content).hexdigest()[:16] == RECORDED[command]
