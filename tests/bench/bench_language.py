"""Language models beside the simplest thing that does the same.

python -m tests.bench.bench_language [--nanogpt FOLDER]

The held-out packages of Python's standard library, as `experiment=lm` reads them, compressed by xz.
Then tiny Shakespeare by nanoGPT and by `experiment=shakespeare`, one thread, both in float32: the
same steps and characters, then the same CPU seconds. The folder is a checkout of nanoGPT in which
data/shakespeare_char/prepare.py has been run.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import resource
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from data.build.tokens import main as build_tokens
from data.language.python_text import python_text
from tests.ranks import ROOT
from tests.runs import Result

STEPS = 2000
# its README's recipe for a CPU, with one evaluation of more batches
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --block_size=64"
    f" --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters={STEPS}"
    f" --lr_decay_iters={STEPS} --dropout=0.0 --eval_interval={STEPS} --eval_iters=200"
)
OUR_RATE = "--learning_rate=4e-3 --min_lr=0.0"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nanogpt", type=Path)
    folder = options.parse_args().nanogpt
    compress()
    if folder is None:
        print("skipped: give --nanogpt FOLDER for tiny Shakespeare")
        return
    print(f"\n{STEPS:,} steps of 12 × 64 characters, one thread, float32, start and end included")
    print("| code | steps | held out, nats per character | CPU s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        text = folder / "data" / "shakespeare_char" / "input.txt"
        data = f"{scratch}/data"
        built = f"--input {text} --tokenizer bytes --val-share 0.1 --output-dir {data}"
        with redirect_stdout(sys.stderr):
            assert not build_tokens(built.split())
        theirs = nanogpt("nanoGPT", folder, scratch)
        nanogpt("nanoGPT, lr 4e-3 to 0", folder, scratch, *OUR_RATE.split())
        seconds = ours(STEPS, scratch)
        ours(round(STEPS * theirs / seconds), scratch)


def compress() -> None:
    """Prints the bits per held-out byte that xz needs, with the training text as history or not."""
    corpus = python_text(64)
    train, held_out = (as_bytes(corpus.files[split][0]) for split in ("train", "val"))
    alone = packed(held_out)
    after = packed(train + held_out) - packed(train)
    print("| xz -9e | bits per held-out byte |\n|---|---|")
    print(f"| {len(held_out):,} bytes alone | {8 * alone / len(held_out):.3f} |")
    print(f"| after all {len(train):,} training bytes | {8 * after / len(held_out):.3f} |")


def as_bytes(tokens: np.ndarray) -> bytes:
    """Returns the bytes of a text, without the begin tokens of its files."""
    return tokens[tokens < 256].astype(np.uint8).tobytes()


def packed(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def nanogpt(name: str, folder: Path, scratch: str, *more: str) -> float:
    said, seconds = run([*NANOGPT.split(), f"--out_dir={scratch}/nanogpt", *more], folder)
    print_row(name, STEPS, float(re.findall(r"val loss ([0-9.]+)", said)[-1]), seconds)
    return seconds


def ours(steps: int, scratch: str) -> float:
    """Trains the recipe for so many steps. Returns the CPU seconds, start and end included."""
    run_folder = Path(scratch, f"run-{steps}")
    _, seconds = run(
        [
            "pretrain.py",
            "experiment=shakespeare",
            f"data_path={scratch}/data",
            f"checkpoint_path={run_folder}",
            "arch.forward_dtype=float32",
            f"max_steps={steps}",
            "eval_every_steps=null",
            "wandb.mode=disabled",
        ],
        ROOT,
    )
    print_row("experiment=shakespeare", steps, Result(run_folder).series("eval/loss")[-1], seconds)
    return seconds


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """Returns a command's output and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENV, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_row(name: str, steps: int, nats: float, seconds: float) -> None:
    print(f"| {name} | {steps:,} | {nats:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
