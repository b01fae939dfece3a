"""Documented commands that train, run as they stand but smaller; `make test-all` runs these."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.data.recursive.arc_helpers import write_folder
from tests.documented import Command, commands, fenced, files
from tests.ranks import ROOT, check_ended_well, run_line, run_ranks
from tests.runs import launched

SMALL_LM = [
    "arch.num_layers=1", "arch.hidden_size=32", "arch.num_heads=2", "data.seq_len=32",
    "data.val_tokens=512", "data.max_new_tokens=4", "tokens_per_update=256", "shards=8",
]  # fmt: skip
SMALL_PUZZLES = [
    "arch.hidden_size=32", "arch.num_heads=2", "arch.halt_max_steps=2", "global_batch_size=8",
    "eval_batch_size=8", "data.embedded.train=16", "data.embedded.test=8",
]  # fmt: skip
# What makes a command small, by what it names; the first that fits.
SMALL = {
    "eval_only=true": [],
    "experiment=demo": ["data.embedded.train=48", "data.embedded.test=16"],
    "experiment=digits": [],
    "experiment=lm": SMALL_LM,
    "experiment=decompose_lm": [
        f"arch.target='experiment=lm max_steps=2 {' '.join(SMALL_LM)}'",
        *("arch.C=4", "data.seq_len=32", "data.val_tokens=256", "tokens_per_update=256"),
    ],
    "experiment=tms_40_10": [
        "arch.target='experiment=tms_target max_steps=2 data.num_features=40 arch.hidden_size=10'"
    ],
    "experiment=tms_5_2": ["arch.target='experiment=tms_target max_steps=2'"],
    "experiment=induction": ["arch.target='experiment=induction_target max_steps=2'"],
    "experiment=resid_mlp": [
        "arch.target='experiment=resid_mlp_target max_steps=2 data.num_features=20"
        " arch.hidden_size=200 arch.mlp_width=10'"
    ],
    "experiment=latent": [
        f"arch.target='experiment=lm max_steps=2 {' '.join(SMALL_LM)}'",
        *("arch.passage=24", "arch.latents=4", "data.seq_len=32", "data.val_tokens=256"),
    ],
    "arch=trm": SMALL_PUZZLES,
    "experiment=sudoku_extreme_cpu": ["global_batch_size=8", "arch.forward_dtype=float32"],
    "experiment=sudoku_extreme": SMALL_PUZZLES,
    "experiment=maze_hard_cpu": ["arch.halt_max_steps=2"],
    "experiment=maze_hard": SMALL_PUZZLES,
    "data_path": SMALL_PUZZLES,
}
# Commands that this test does not run, and what covers them besides test_documented_commands.py.
NOT_RUN = {
    r"--hub|data\.hub=|-m pip": "needs the network",
    r"experiment=lm_1b3|experiment=resid_mlp_1\b": "needs a GPU",
    r"tests\.(bench|gpu)": "make bench, make gpu",
    r"evaluate\.py": "is HRM's own",
    r"--help|--cfg|--config-dir": "tests/test_layout.py tests/test_config.py",
    r"hydra/|pretrain\.py -m|sweep\.": "tests/utils/sweep",
    r"plan=": "tests/test_memory_plan.py",
    r"checkpoint (digest|show|verify|diff|export|import)|=(FOLDER|PATH)": "tests/utils/checkpoint",
    r"data\.build": "tests/data",
    r"utils\.report": "tests/utils/report",
    r"models\.llama|latent.*data=stream": "tests/models tests/test_latent.py",
    r"=(mine|bars|focal|sign_descent|one_by_one)\b": "tests/test_extending.py",
    r"-m pytest|=K\b|--max-restarts|python pretrain\.py$": "is no run, or stands for others",
}
TRAINING = [
    command
    for path in files()
    for command in commands(path)
    if "pretrain.py" in command.words
    and command.words[0] in ("python", "torchrun")
    and len(command.words) > 2
    and not any(re.search(pattern, str(command)) for pattern in NOT_RUN)
]
RUNS = {" ".join(command.words): command for command in TRAINING}


def small(command: Command) -> list[str]:
    """The arguments of pretrain.py, and what makes the run small."""
    words = list(command.words[command.words.index("pretrain.py") + 1 :])
    fitting = [more for key, more in SMALL.items() if key in " ".join(words)]
    assert fitting, f"{command.where}: add what makes this small to SMALL: {command}"
    more = fitting[0]
    steps = [] if "eval_only=true" in words else ["max_steps=2", "eval_every_steps=null"]
    kept = [word for word in words if not word.startswith(("max_tokens=", "max_steps="))]
    return [*kept, *more, *steps, "wandb.mode=disabled", "timeout_s=60"]


def build(folder: Path, module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"data.build.{module}", *arguments]
    done = launched(["env", f"PYTHONPATH={ROOT}", *command], cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a fresh clone, with small datasets and runs that documented commands name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pretrain.py", "launch"):
        (folder / name).symlink_to(ROOT / name)
    sudoku = ("--size", "4", "--blanks", "3", "--train", "16", "--test", "8")
    for name in ("sudoku-extreme-1k-aug-1000", "sudoku-extreme-1k"):
        build(folder, "sudoku", *sudoku, "--output-dir", f"data/{name}")
    boards = ("--size", "6", "--blanks", "3", "--train", "8", "--test", "8")
    build(folder, "sudoku", *boards, "--output-dir", "data/boards")
    maze = ("--size", "8", "--min-path", "5", "--train", "16", "--test", "8")
    build(folder, "maze", *maze, "--output-dir", "data/maze-30x30-hard-1k")
    write_folder(folder / "training", "abc", 0)
    write_folder(folder / "evaluation", "de", 1)
    arc = ("--train", "training", "--test", "evaluation", "--num-aug", "2")
    build(folder, "arc", *arc, "--output-dir", "data/arc-aug-1000")
    (folder / "text.txt").write_text("the same run, at any number of ranks\n" * 500)
    text = ("--input", "text.txt", "--tokenizer", "bytes", "--val-share", "0.1")
    build(folder, "tokens", *text, "--output-dir", "data/mine")
    boards = "sudoku_extreme_cpu data_path=data/sudoku-extreme-1k"
    for line in ("demo", "lm", boards):
        first = Command("", (), ("python", "pretrain.py", *f"experiment={line}".split()))
        check_ended_well(run_line(small(first), folder, limit_s=200))
    return folder


def test_every_command_runs_or_says_why_not() -> None:
    for path in files():
        for command in commands(path):
            if command.words[0] in ("python", "python3", "torchrun"):
                reasons = [why for what, why in NOT_RUN.items() if re.search(what, str(command))]
                run = " ".join(command.words) in RUNS
                assert run or reasons, f"{command.where}: {command}: add it to SMALL or NOT_RUN"
    assert all(small(command) for command in RUNS.values())
    for name in " ".join(NOT_RUN.values()).split():
        assert not name.startswith("tests/") or (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", RUNS.values(), ids=RUNS)
def test_documented_commands_train(command: Command, clone: Path) -> None:
    ranks = re.search(r"--nproc-per-node (\d+)", str(command))
    if ranks:
        arguments = ["pretrain.py", *small(command)]
        check_ended_well(run_ranks(min(int(ranks[1]), 4), arguments, 300, cwd=clone))
    else:
        check_ended_well(run_line(small(command), clone, limit_s=300))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_commands_show_the_same_run(tmp_path: Path) -> None:
    """The section on the digest as bash runs it, with four steps instead of sixty."""
    lines = (line for _, line, language in fenced(ROOT / "docs/the-same-run.md") if language == "")
    script = [line for line in lines if re.match(r"R=|for NAME|(python|torchrun) .*\$R", line)]
    assert len(script) == 5
    text = "\n".join(script).replace("max_steps=60", "max_steps=4 data.embedded.test=16")
    (tmp_path / "pretrain.py").symlink_to(ROOT / "pretrain.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["env", f"PATH={path}", f"PYTHONPATH={ROOT}", "bash", "-e", "-c", text]
    done = launched(words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"^.*\b[0-9a-f]{64}\b.*$", done.stdout, re.MULTILINE)
    assert len(digests) == 3
    assert len({re.findall(r"[0-9a-f]{64}", line)[0] for line in digests}) == 1
