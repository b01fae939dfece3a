"""Evaluates the weights of this repository on puzzles that are made here, and compares with what
RESULTS.md claims: `make results`. The published boards of Sudoku-Extreme are added where a dataset
of them is given: `make results SUDOKU=FOLDER`.

python -m tests.bench.results [--sudoku FOLDER] [NAME ...]
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from utils.errors import ConfigError, exit_status
from utils.files import ROOT
from utils.measure.metrics import wilson
from utils.rundir.records import read_metrics

WEIGHTS = ROOT / "weights"
SUDOKU = "sudoku_extreme", "sudoku_extreme_1", "sudoku_extreme_2"  # seeds 0, 1 and 2


@dataclass(frozen=True)
class Claim:
    """A share of examples that weights answer rightly, or another metric."""

    weights: str
    of: int  # examples
    right: float  # of them
    data: str  # in words
    build: str = ""  # a builder and its options, whose folder is the data
    keys: str = ""  # of the evaluation
    metric: str = "eval/exact_accuracy"


CLAIMS = [
    Claim("demo", 500, 499, "held-out boards, 6×6"),
    Claim("demo", 1000, 998, "more boards", keys="data.embedded.seed=1 data.embedded.test=1000"),
    Claim(
        "maze_unique",
        200,
        198,
        "new mazes",
        "maze --size 30 --unique --train 8 --test 200 --seed 1",
        "data.eval_split=test",
    ),
    Claim(
        "maze_hard",
        200,
        189,
        "new mazes",
        "maze --size 30 --train 8 --test 200 --seed 1",
        "data.eval_split=test",
    ),
    *(
        Claim(
            name,
            20,
            20,
            "new boards that need guesses",
            "sudoku --size 9 --blanks 56 --min-guesses 3 --train 40 --test 20 --seed 5",
            "data.eval_split=test",
        )
        for name in SUDOKU
    ),
    Claim("tms_5_2", 4096, 781, "inputs: components needed", metric="eval/l0/linear1"),
]
PUBLISHED = [
    Claim(name, 200, right, "held-out boards", keys="data.eval_split=validation")
    for name, right in zip(SUDOKU, (199, 200, 200), strict=True)
]


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status: 1 if a figure is not as claimed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.results", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of weights/; default all")
    parser.add_argument("--sudoku", metavar="FOLDER", help="a dataset of the published boards")
    asked = parser.parse_args(arguments)
    claims = CLAIMS + (PUBLISHED if asked.sudoku else [])
    differing = 0

    def work() -> None:
        nonlocal differing
        if unknown := {*asked.names} - {claim.weights for claim in CLAIMS}:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not in {WEIGHTS.name}/")
        print("| weights | evaluated on | claimed | seen | |\n|---|---|---|---|---|")
        for claim in claims:
            if not asked.names or claim.weights in asked.names:
                published = asked.sudoku if claim in PUBLISHED else None
                differing += not check(claim, published)

    return exit_status(work) or int(differing > 0)


def check(claim: Claim, published: str | None) -> bool:
    """Prints a row of the table; returns whether the figure is within the claim's interval."""
    seen = evaluate(claim, published)
    low, high = wilson(claim.right, claim.of)
    fine = low <= seen <= high
    claimed = f"{claim.right / claim.of:.2%} ({low:.2%} to {high:.2%})"
    row = claim.weights, f"{claim.of:,} {claim.data}", claimed, f"{seen:.2%}", "" if fine else "no"
    print(f"| {' | '.join(row)} |", flush=True)
    return fine


def evaluate(claim: Claim, published: str | None) -> float:
    """Returns the metric that a claim is about."""
    with tempfile.TemporaryDirectory() as folder:
        keys = claim.keys.split()
        if claim.build:
            builder, *options = claim.build.split()
            run("-m", f"data.build.{builder}", *options, "--output-dir", f"{folder}/data")
            keys.append(f"data_path={folder}/data")
        if published:
            keys.append(f"data_path={Path(published).absolute()}")
        weights = f"checkpoint={WEIGHTS / claim.weights}"
        keys += ["log=[]", "report=false", f"checkpoint_path={folder}/run"]
        run("pretrain.py", "eval_only=true", weights, *keys)
        (value,) = read_metrics(Path(folder, "run"))["eval"].by_step(claim.metric).values()
        return value


def run(*arguments: str) -> None:
    """Runs Python in this repository; what it prints is shown if it fails."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(arguments)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
