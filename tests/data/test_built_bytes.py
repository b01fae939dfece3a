"""Builders make the bytes that they have always made: runs resume only with the same data."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.data.recursive.arc_helpers import write_folder

RECORDED = {
    "sudoku --size 9 --train 24 --test 8 --num-aug 2": "a6ff8bd511177fb3",
    "sudoku --size 9 --blanks 56 --min-guesses 1 --train 10 --test 4": "ac66e6003525cc9d",
    "maze --size 10 --min-path 16 --train 20 --test 8 --workers 1 --augment": "7a31e242272cee04",
    "maze --size 10 --min-path 16 --train 10 --test 8 --workers 1 --unique": "f5452869a97d7164",
    "arc --train {folder}/in --num-aug 9": "2c4cfc1d1b45ec86",
    "tokens --input {folder}/in/task_a.json --tokenizer bytes --workers 1": "601817a7108a4e47",
}


@pytest.mark.parametrize("command", RECORDED)
def test_the_fingerprint_is_the_recorded_one(command: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "ab", 0)
    builder, *arguments = command.replace("{folder}", str(tmp_path)).split()
    main = import_module(f"data.build.{builder}").main
    for name in ("one", "two"):  # and any build is the same
        assert main([*arguments, "--output-dir", str(tmp_path / name)]) == 0
    files = [path for path in sorted((tmp_path / "one").rglob("*")) if path.is_file()]
    for file in files:
        other = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert file.read_bytes() == other.read_bytes()
    (described, *_) = [file for file in files[::-1] if file.name == "dataset.json"]
    assert json.loads(described.read_text())["fingerprint"][:16] == RECORDED[command]
