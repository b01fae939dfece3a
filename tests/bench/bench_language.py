"""Language models beside the simplest thing that does the same.

python -m tests.bench.bench_language [--nanogpt FOLDER]

The held-out packages of Python's standard library by an n-gram model, trained on all text that
`experiment=lm` may see, and by xz. Then tiny Shakespeare by an n-gram model, nanoGPT and
`experiment=shakespeare`, one thread, both in float32: whole recipes, then ours in nanoGPT's CPU
seconds. The folder is a checkout of nanoGPT in which data/shakespeare_char/prepare.py has been run.
"""

import argparse
import lzma
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from contract import IGNORE, Arrays, Source
from data.build.tokens import main as build_tokens
from data.language.python_text import python_text
from data.source import source_of
from tests.bench.checkouts import check_checkout
from tests.bench.ngram import log_probabilities
from tests.ranks import ROOT, words
from tests.runs import Result, config_of
from utils.errors import exit_status

STEPS = 2000
# its README's recipe for a CPU, with one evaluation of more batches
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --block_size=64"
    f" --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters={STEPS}"
    f" --lr_decay_iters={STEPS} --dropout=0.0 --eval_interval={STEPS} --eval_iters=200"
)
OUR_RATE = "--learning_rate=4e-3 --min_lr=0.0"
PREPARED = "data/shakespeare_char"  # in nanoGPT's folder
ORDERS = {"library": 16, "Shakespeare": 7}  # of n-gram models
WINDOW = 1024  # bytes that n-grams are asked for at once, after which their context is empty
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nanogpt", type=Path)
    folder = options.parse_args().nanogpt
    if folder is not None:
        for file in ("train.py", f"{PREPARED}/input.txt", f"{PREPARED}/val.bin"):
            check_checkout("--nanogpt", folder, file)
    library()
    if folder is None:
        print("skipped: give --nanogpt FOLDER for tiny Shakespeare")
        return
    print("\none thread, float32, start and end included")
    print("| code | steps | held out, nats per character | CPU s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        text = f"--input {folder / PREPARED / 'input.txt'} --val-share 0.1"
        for kind, name in (("--tokenizer bytes", "bytes"), ("--train-bpe 1024", "data")):
            with redirect_stdout(sys.stderr):
                built = f"{text} {kind} --output-dir {scratch}/{name}"
                assert not build_tokens(built.split())
        shakespeare(folder, f"{scratch}/bytes")
        theirs = nanogpt("nanoGPT", folder, scratch)
        nanogpt("nanoGPT, lr 4e-3 to 0", folder, scratch, *OUR_RATE.split())
        steps = config_of("experiment=shakespeare").max_steps
        seconds = ours(steps, scratch)
        ours(round(steps * theirs / seconds), scratch)


def library() -> None:
    """Prints the bits per held-out byte of n-gram models and of xz."""
    keys = f"data.embedded.bpe=null data.seq_len={WINDOW} tokens_per_update={8 * WINDOW}"
    source = source_of(config_of("experiment=lm", *words(keys)).plain())
    corpus = python_text(64)
    train, held_out = (as_bytes(corpus.files[split][0]) for split in ("train", "val"))
    labels = held_out_rows(source)[:, 1:]
    # the net and the n-gram are asked for the bytes that xz compresses, and begin tokens
    assert as_bytes(labels[labels != IGNORE]) == held_out

    print("| of the held-out bytes | bits per byte | CPU s |\n|---|---|---|")
    nats, seconds = by_ngrams(corpus.files["train"][0][None], source, ORDERS["library"])
    bits = nats / math.log(2) / len(held_out)
    name = f"n-grams of order {ORDERS['library']}, all {len(train):,} training bytes"
    print(f"| {name} | {bits:.3f} | {seconds:.0f} |")
    alone = packed(held_out)
    after = packed(train + held_out) - packed(train)
    print(f"| xz -9e, {len(held_out):,} bytes alone | {8 * alone / len(held_out):.3f} | |")
    print(f"| xz -9e, after the training bytes | {8 * after / len(held_out):.3f} | |", flush=True)


def shakespeare(folder: Path, data: str) -> None:
    """Prints the row of an n-gram model that has counted the training text once."""
    keys = f"experiment=shakespeare data_path={data} data.seq_len={WINDOW}"
    source = source_of(config_of(*words(keys)).plain())
    asked = int((held_out_rows(source)[:, 1:] != IGNORE).sum())
    text = np.load(f"{data}/train_000000.npy")
    # of nanoGPT's files two bytes are a character; ours begin with a token that is none
    theirs = [(folder / PREPARED / f"{name}.bin").stat().st_size // 2 for name in ("train", "val")]
    assert [len(text) - 1, asked] == theirs
    nats, seconds = by_ngrams(text[None], source, ORDERS["Shakespeare"])
    print_row(f"n-grams of order {ORDERS['Shakespeare']}", "", nats / asked, seconds)


def by_ngrams(train: np.ndarray, source: Source, order: int) -> tuple[float, float]:
    """Returns the nats that an n-gram model needs for the labels of the held-out windows, and the
    CPU seconds.
    """
    began = time.process_time()
    rows = held_out_rows(source)
    asked = rows[:, 1:] != IGNORE
    known = np.where(rows == IGNORE, 0, rows)
    chances = log_probabilities(train, known, order, source.spec.vocab_size)
    return -float(chances[asked].sum()), time.process_time() - began


def held_out_rows(source: Source) -> np.ndarray:
    """Returns the windows that evaluations of a run predict, from their second token on."""
    held_out = source.eval_sets()["val"]
    return rows_of(held_out.read(np.arange(len(held_out))))


def rows_of(batch: Arrays) -> np.ndarray:
    """Returns the tokens of windows, with the label of the last position."""
    return np.concatenate([batch["inputs"][:, :1], batch["labels"]], 1)


def as_bytes(tokens: np.ndarray) -> bytes:
    """Returns the bytes of a text, without the begin tokens of its files."""
    return tokens[tokens < 256].astype(np.uint8).tobytes()


def packed(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def nanogpt(name: str, folder: Path, scratch: str, *more: str) -> float:
    said, seconds = run([*NANOGPT.split(), f"--out_dir={scratch}/nanogpt", *more], folder)
    nats = float(re.findall(r"val loss ([0-9.]+)", said)[-1])
    print_row(name, f"{STEPS:,}", nats, seconds)
    return seconds


def ours(steps: int, scratch: str) -> float:
    """Trains the recipe for so many steps. Returns the CPU seconds, start and end included."""
    run_folder = Path(scratch, f"run-{steps}")
    keys = f"experiment=shakespeare data_path={scratch}/data checkpoint_path={run_folder}"
    keys += f" arch.forward_dtype=float32 max_steps={steps} eval_every_steps=null"
    _, seconds = run(words(f"pretrain.py {keys} wandb.mode=disabled"), ROOT)
    nats = math.log(2) * Result(run_folder).series("eval/bpb")[-1]  # a character is a byte
    print_row("experiment=shakespeare", f"{steps:,}", nats, seconds)
    return seconds


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """Returns a command's output and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENV, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_row(name: str, steps: str, nats: float, seconds: float) -> None:
    print(f"| {name} | {steps} | {nats:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main))
