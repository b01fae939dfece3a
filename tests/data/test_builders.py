"""What builders write, byte by byte; and of wrong input one line that names the file or the option,
status 2, and nothing written.
"""

import hashlib
import json
import os
from importlib import import_module
from pathlib import Path

import pytest

from tests.data.helpers import built
from tests.data.recursive.arc_helpers import write_folder

HEADER = "source,question,answer,rating\n"
Q, A = "123...1221434321", "1234341221434321"
OTHER = A.translate(str.maketrans("12", "21"))
PAIR: dict[str, object] = {"input": [[1, 2]], "output": [[3]]}
TWIN = PAIR | {"input": [[0]]}
LINE, GRIDS = json.dumps(PAIR), "--train {in}/a --test {in}/a"
CSV, TEST, BYTES = "--input-dir {in}", "--test {in}", "--tokenizer bytes --input {in}"


def line(**changes: object) -> str:
    return json.dumps(PAIR | changes)


def table(*rows: str) -> dict[str, str | None]:
    return {"train.csv": HEADER + "".join(f"{row}\n" for row in rows)}


def task(pair: object = PAIR) -> str:
    return json.dumps({"train": [PAIR], "test": [pair]})


def kaggle(grid: object, answers: object) -> dict[str, str | None]:
    tasks = {"b": {"train": [PAIR], "test": [{"input": grid}]}}
    return {
        "x_challenges.json": json.dumps(tasks),
        "x_solutions.json": json.dumps({"b": answers}),
    }


# the builder, its arguments, the files in {in} (a pipe where None), and what the line names
WRONG: list[tuple[str, str, dict[str, str | None], str]] = [
    ("sudoku", "--size 7", {}, "--size"),
    ("sudoku", "", {}, "--size"),
    ("sudoku", "--size 4 --seed -1", {}, "--seed"),
    ("sudoku", "--size 4 --blanks 16", {}, "blanks=16"),
    ("sudoku", "--size 4 --blanks 14 --train 5 --test 5", {}, "blanks=14: only 0 of 5"),
    ("sudoku", "--size 4 --blanks 1 --train 4601 --test 8", {}, "train=4601 test=8: at most 4,608"),
    ("sudoku", CSV, {}, "no train.csv"),
    ("sudoku", CSV, {"train.csv": None}, "{in}/train.csv: cannot be used (not a plain file)"),
    ("sudoku", CSV, table(f"a,{'1' * 140_000},{A},3"), "line 2: field larger than field limit"),
    ("sudoku", "--size 4 --num-aug 100000000000", {}, "too much for this machine"),
    ("sudoku", CSV, table(), "holds no boards"),
    ("sudoku", CSV, table(f"a,{Q}.,{A},3"), "line 2 has 17 and 16 cells"),
    ("sudoku", CSV, table(f"a,{Q},,3"), "line 2 has 16 and 0 cells"),
    ("sudoku", CSV, table(f"a,z{Q[1:]},{A},3"), "line 2 has characters other"),
    ("sudoku", CSV, table(f"a,{Q},{OTHER},3"), "that contradicts"),
    ("sudoku", CSV, table(f"a,{Q},11{A[2:]},3"), "that is not a solved board"),
    ("sudoku", CSV + " --min-difficulty 1", table(f"a,{Q},{A},"), "line 2 has rating"),
    ("sudoku", "--size 4 --min-difficulty 2", {}, "--min-difficulty: is for given puzzles alone"),
    ("sudoku", CSV + " --train 1 --validation 1", table(f"a,{Q},{A},3"), "--validation 1"),
    ("sudoku", CSV + " --blanks 3", {}, "--blanks: is for generated puzzles"),
    ("maze", "--size 65", {}, "--size"),
    ("maze", "--size 5 --min-path 26", {}, "--min-path 26"),
    ("maze", CSV, table("a,S  x,So x,3"), "line 2 has a question with characters"),
    ("maze", CSV, table("a,SS G,SSoG,3"), "line 2 does not have exactly one S in its question"),
    ("maze", CSV, table("a,S  G,SooG,3"), "an answer that is not the question"),
    ("maze", CSV + " --unique", table("a,S G,SoG,3"), "--unique: is for generated puzzles"),
    ("arc", "", {}, "--train, --test"),
    ("arc", "--train nowhere", {}, "--train nowhere"),
    ("arc", TEST, {}, "holds no .json files"),
    ("arc", TEST, {"a.json": "{"}, "a.json"),
    ("arc", TEST, {"a.json": '{"train": [], "test": [1]}'}, "a.json: train"),
    ("arc", TEST, {"a.json": task({"input": [[1]]})}, "a.json: test.0.output"),
    ("arc", TEST, {"a.json": task(PAIR | {"input": [[10]]})}, "test.0.input.0.0=10"),
    ("arc", TEST, {"a.json": task(PAIR | {"input": [[1, 2], [3]]})}, "test.0.input"),
    ("arc", TEST + "/a.json {in}/b", {"a.json": task(), "b/a.json": task(TWIN)}, "another task"),
    ("arc", TEST, {"y_challenges.json": "{}"}, "y_challenges.json"),
    ("arc", TEST + "/x", {"x_challenges.json": "{}"}, "x_solutions.json"),
    ("arc", TEST + "/x", kaggle([[1] * 31], [[[1]]]), "x_challenges.json: b.test.0.input.0"),
    ("arc", TEST + "/x", kaggle([[1]], []), "task b has 0 answers for 1 test"),
    ("grids", GRIDS, {}, "{in}/a"),
    ("grids", GRIDS, {"a": None}, "{in}/a: cannot be used (not a plain file)"),
    ("grids", f"{GRIDS} --permute 1 --num-aug {10**11}", {"a": line(puzzle="x")}, "too much for"),
    ("grids", GRIDS, {"a": ""}, "{in}/a: holds no examples"),
    ("grids", GRIDS, {"a": f"{LINE}\n\n{{"}, "{in}/a: line 3: "),
    ("grids", GRIDS, {"a": '{"input": [[1]]}'}, "{in}/a: line 1: output: Field required"),
    ("grids", GRIDS, {"a": line(input=[[1, 250]])}, "{in}/a: line 1: input.0.1=250"),
    ("grids", GRIDS, {"a": line(output=[[1, 2], [3]])}, "line 1: output=[[1, 2], [3]]: "),
    ("grids", GRIDS, {"a": line(input=[[1]] * 31)}, "line 1: input="),
    ("grids", GRIDS, {"a": f"{LINE}\n{line(puzzle='x')}"}, "{in}/a: line 2: has a puzzle"),
    ("grids", GRIDS, {"a": f"{line(puzzle='x')}\n{LINE}"}, "{in}/a: line 2: lacks a puzzle"),
    ("grids", GRIDS[:-1] + "b", {"a": line(puzzle="x"), "b": line(puzzle="y")}, "line 1: puzzle=y"),
    ("grids", GRIDS + " --permute 250", {"a": LINE}, "--permute"),
    ("grids", GRIDS + " --num-aug 3", {"a": LINE}, "--num-aug, --permute: mean nothing alone"),
    ("tokens", BYTES + "/none", {}, "{in}/none"),
    ("tokens", BYTES, {}, "{in}"),
    ("tokens", BYTES, {"a.txt": ""}, "no text is left"),
    ("tokens", BYTES, {"a.txt": "n\udce9"}, "{in}/a.txt"),
    ("tokens", BYTES, {"x.jsonl": '{"text": "a"}\n{"body": "b"}\n'}, "line 2"),
    ("tokens", BYTES + " --field n", {"x.jsonl": '{"n": 1}'}, "line 1"),
    ("tokens", BYTES, {"x.jsonl": "{"}, "{in}/x.jsonl: line 1"),
    ("tokens", BYTES, {"z.parquet": "PAR1"}, "{in}/z.parquet"),
    ("tokens", BYTES + " --val-share 1", {"a.txt": "a"}, "--val-share"),
    ("tokens", "--input {in} --train-bpe 9", {"a.txt": "a"}, "--train-bpe"),
    ("tokens", "--input {in} --tokenizer {in}/none.json", {"a.txt": "a"}, "{in}/none.json"),
    ("tokens", "--input {in} --tokenizer {in}/a.txt", {"a.txt": "a"}, "is not a tokenizer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("builder", "arguments", "files", "named"),
    WRONG,
    ids=[f"{builder} {named}" for builder, _, _, named in WRONG],
)
def test_wrong_input_is_one_line(
    builder: str,
    arguments: str,
    files: dict[str, str | None],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    arguments, named = (text.replace("{in}", str(folder)) for text in (arguments, named))
    main = import_module(f"data.build.{builder}").main
    assert main(["--output-dir", str(tmp_path / "out"), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# runs resume only with the same data
RECORDED = {
    "sudoku --size 9 --train 24 --test 8 --num-aug 2": "d0bae7d3bb0c890e",
    "sudoku --size 9 --blanks 56 --min-guesses 1 --train 10 --test 4": "760b1e4fcc99a099",
    "maze --size 10 --min-path 16 --train 20 --test 8 --augment": "6dda0199b1664d8e",
    "maze --size 12 --unique --train 20 --test 8": "5852c39170413c4d",
    "arc --train {folder}/in --num-aug 9": "e0e0cc30d97cb1c4",
    "grids --train {folder}/a --test {folder}/b --permute 1 2 3 --num-aug 4": "ccea4df5c9315b9b",
    "tokens --input {folder}/in/task_a.json --tokenizer bytes": "4aa2805eb64c1aee",
}


@pytest.mark.parametrize("command", RECORDED)
def test_builders_make_the_bytes_that_they_have_always_made(command: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "ab", 0)
    (tmp_path / "a").write_text(f"{line(puzzle='x')}\n{line(puzzle='y', input=[[1], [2]])}\n")
    (tmp_path / "b").write_text(line(puzzle="y"))
    folder = built(tmp_path / "out", *command.replace("{folder}", str(tmp_path)).split())
    content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    assert hashlib.sha256(content).hexdigest()[:16] == RECORDED[command]
