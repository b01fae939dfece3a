"""Tiny Shakespeare by nanoGPT's CPU recipe and by `experiment=shakespeare`: the same steps and
characters, one after the other, one thread.

python -m tests.bench.bench_shakespeare --nanogpt FOLDER

The folder is a checkout in which data/shakespeare_char/prepare.py has been run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

from data.build.tokens import main as build_tokens
from tests.ranks import ROOT
from tests.runs import Result

STEPS = 2000
# as its README has it, but for evaluations: one, of more batches
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --block_size=64"
    f" --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters={STEPS}"
    f" --lr_decay_iters={STEPS} --dropout=0.0 --eval_interval={STEPS} --eval_iters=200"
)
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """Returns a command's output and its duration."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENV, capture_output=True, text=True, check=True
    )
    return done.stdout, time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nanogpt", type=Path)
    folder = options.parse_args().nanogpt
    if folder is None:
        print("skipped: give --nanogpt FOLDER, a checkout of nanoGPT")
        return
    print(f"{STEPS:,} steps of 12 × 64 characters, one thread, start and end included")
    print("| code | held out, nats a character | s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        text = folder / "data" / "shakespeare_char" / "input.txt"
        built = [
            "--input",
            str(text),
            "--tokenizer",
            "bytes",
            "--val-share",
            "0.1",
            "--output-dir",
            f"{scratch}/data",
        ]
        with redirect_stdout(sys.stderr):
            assert not build_tokens(built)
        ours = [
            "pretrain.py",
            "experiment=shakespeare",
            f"data_path={scratch}/data",
            f"checkpoint_path={scratch}/run",
            "wandb.mode=disabled",
        ]
        _, seconds = run([*ours, f"max_steps={STEPS}", "eval_every_steps=null"], ROOT)
        print(
            "| experiment=shakespeare |"
            f" {Result(Path(scratch) / 'run').series('eval/loss')[-1]:.3f} | {seconds:.0f} |",
            flush=True,
        )
        said, seconds = run([*NANOGPT.split(), f"--out_dir={scratch}/nanogpt"], folder)
        print(
            f"| nanoGPT | {float(re.findall(r'val loss ([0-9.]+)', said)[-1]):.3f} |"
            f" {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
