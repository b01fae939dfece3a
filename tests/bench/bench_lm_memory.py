"""Measures the peak memory of a language model's step: logits whole or in pieces, activations kept
or recomputed.

python -m tests.bench.bench_lm_memory
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

from models.language.causal_lm import CausalLM
from models.language.gpt import GPT
from models.objective import Context
from tests.ranks import ROOT
from utils.noise import Noise
from utils.spec import Spec

CASES = {
    "all logits at once": (None, False),
    "pieces of 1,024 tokens": (1024, False),
    "pieces, recomputed": (1024, True),
}
LENGTH, ROWS, VOCAB = 1024, 8, 32768


def measure(chunk: int | None, recompute: bool) -> dict[str, float]:
    """In this process, which nothing else has grown."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT(
        Spec(vocab_size=VOCAB, seq_len=LENGTH),
        num_layers=8,
        hidden_size=256,
        num_heads=4,
        recompute=recompute,
        tied=True,
    )
    objective, tokens = CausalLM(net, chunk), torch.randint(0, VOCAB, (ROWS, LENGTH + 1))
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    objective(
        {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}, None, Context(0.0, Noise(0, 0, [0]))
    ).loss.backward()
    return {
        "MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "s": time.perf_counter() - start,
    }


def main() -> None:
    """One process for each case, as a process never gives back what it once held at most."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(*CASES[sys.argv[1]])))
        return
    print(
        f"GPT, 8 layers of width 256, {ROWS} × {LENGTH} tokens, vocabulary {VOCAB}, float32, one"
        " thread: forward and backward"
    )
    print("| what | more memory, MiB | s |\n|---|---|---|")
    for name in CASES:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        figures = json.loads(done.stdout)
        print(f"| {name} | {figures['MiB']:.0f} | {figures['s']:.1f} |")


if __name__ == "__main__":
    main()
