"""Texts of one row by our net and by nanoGPT's, of one size, in turns on one CPU thread: CPU time
of a token, from an empty context of one token on.

python -m tests.bench.bench_generate --nanogpt FOLDER

The folder is a checkout. Both draw from the 200 likeliest tokens at temperature 0.8. Where the
context is full, nanoGPT computes all of its latest tokens again for each new one, and ours goes on
from the later half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.bench.bench_gpt_step import VOCABULARY, Size, measure, nanogpt
from tests.making import make_objective
from utils.measure import hardware
from utils.spec import Spec

# a net with room for so many positions, and how many tokens it makes
TEXTS = (
    (Size(1, 64, 4, 4, 128), 64),
    (Size(1, 256, 4, 4, 128), 256),
    (Size(1, 256, 4, 4, 128), 500),
)
TEMPERATURE, TOP_K = 0.8, 200


def ours(size: Size, tokens: int, dtype: str) -> Callable[[], Tensor]:
    """Returns what makes a text with the net of experiment=shakespeare."""
    objective = make_objective(
        "gpt",
        Spec(vocab_size=VOCABULARY, seq_len=size.length),
        num_layers=size.layers,
        hidden_size=size.width,
        num_heads=size.heads,
        tied=True,
        forward_dtype=dtype,
    )
    batch = {
        "inputs": torch.zeros(1, 1, dtype=torch.int32),
        "continuation": torch.zeros(1, tokens, dtype=torch.int32),
        "temperature": torch.tensor([TEMPERATURE]),
        "top_k": torch.tensor([TOP_K]),
        "sample_seed": torch.tensor([0]),
    }
    return torch.no_grad()(lambda: objective.continue_prompt(batch))


def theirs(size: Size, tokens: int, folder: Path) -> Callable[[], Tensor]:
    """Returns what makes a text with nanoGPT's net."""
    net = nanogpt(size, folder).eval()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    return lambda: net.generate(prompt, tokens, temperature=TEMPERATURE, top_k=TOP_K)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nanogpt", type=Path)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    if given.nanogpt is None:
        print("skipped: give --nanogpt FOLDER, a checkout of nanoGPT")
        return
    torch.set_num_threads(1)
    hardware.tune()
    print("ms per token\n| context | tokens | nanoGPT | ours, float32 | ours, bfloat16 |")
    print("|---|---|---|---|---|")
    for size, tokens in TEXTS:
        ways = {"nanoGPT": theirs(size, tokens, given.nanogpt)}
        for dtype in ("float32", "bfloat16"):
            ways[dtype] = ours(size, tokens, dtype)
        nanogpt_s, *ours_s = measure(ways, given.rounds).values()
        cells = [f"{1000 * nanogpt_s / tokens:.2f}"] + [
            f"{1000 * each / tokens:.2f} ({nanogpt_s / each:.1f}×)" for each in ours_s
        ]
        print(f"| {size.length} | {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
