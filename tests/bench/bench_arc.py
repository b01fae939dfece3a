"""How fast ARC datasets are built and in how much memory, beside TRM's builder on the same tasks in
the same minutes.

python -m tests.bench.bench_arc --data DATA/arc-agi --num-aug 1000 --trm FOLDER

DATA/arc-agi is what comes before _training_challenges.json in the names of Kaggle's files, FOLDER a
checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench.checkouts import check_checkout
from tests.data.recursive.arc_helpers import task
from tests.ranks import ROOT
from utils.errors import ConfigError, exit_status

# The published builder as it is, called as its command line calls it; that line's own package may
# be missing here
PUBLISHED = """
import sys, types
folder, data, out, num_aug = sys.argv[1:]
class ArgParser:
    def command(self, **_): return lambda function: function
sys.modules["argdantic"] = types.SimpleNamespace(ArgParser=ArgParser)
sys.path.insert(0, folder)
from dataset.build_arc_dataset import DataProcessConfig, convert_dataset
convert_dataset(DataProcessConfig(input_file_prefix=data, output_dir=out, subsets=["training", "evaluation"], test_set_name="evaluation", num_aug=num_aug))
"""  # noqa: E501


def made_up(folder: Path) -> str:
    """Tasks of about the size of real ones, in Kaggle's form."""
    rng = np.random.default_rng(0)
    for split in ("training", "evaluation"):
        tasks = {f"{split}{number}": task(rng, 3, 1, 20) for number in range(30)}
        solutions = {
            name: [pair.pop("output") for pair in one["test"]] for name, one in tasks.items()
        }
        for kind, content in (("challenges", tasks), ("solutions", solutions)):
            (folder / f"made-up_{split}_{kind}.json").write_text(json.dumps(content))
    return str(folder / "made-up")


def measured(command: list[str]) -> tuple[float, float, float]:
    """Seconds by the clock and of computing, and the most memory in MiB."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", help="what comes before _training_challenges.json; without it tasks are made up"
    )
    parser.add_argument("--num-aug", default="50")
    parser.add_argument("--trm", help="a checkout of TinyRecursiveModels")
    options = parser.parse_args()
    first = f"{options.data}_training_challenges.json"
    if options.data and not Path(first).is_file():
        raise ConfigError(
            f"--data {options.data}: no {first} there; give what comes before"
            " _training_challenges.json, such as DATA/arc-agi"
        )
    if options.trm:
        check_checkout("--trm", options.trm, "dataset/build_arc_dataset.py")
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or made_up(Path(scratch))
        ours = ["--train", f"{data}_training", "--test", f"{data}_evaluation"]
        ours += ["--num-aug", options.num_aug, "--output-dir", f"{scratch}/ours"]
        commands = {"data.build.arc": ["-m", "data.build.arc", *ours]}
        if options.trm:
            theirs = [options.trm, data, f"{scratch}/theirs", options.num_aug]
            commands["TRM's builder"] = ["-c", PUBLISHED, *theirs]
        figures = {name: measured([sys.executable, *command]) for name, command in commands.items()}
    for name, (clock, computing, memory) in figures.items():
        print(
            f"{name:16} {clock:8.1f} s   {computing:8.1f} s of computing   {memory:8,.0f} MiB  "
            f" --num-aug {options.num_aug}"
        )
    if options.trm:
        (clock, computing, memory), theirs = figures.values()
        shares = theirs[0] / clock, theirs[1] / computing, theirs[2] / memory
        print(
            "in 1/{:.1f} of the time, 1/{:.1f} of the computing, 1/{:.1f} of the memory".format(
                *shares
            )
        )


if __name__ == "__main__":
    sys.exit(exit_status(main))
