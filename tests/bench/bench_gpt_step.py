"""Forward and backward of a language model on one CPU thread: ours and nanoGPT's, of one size, in
turns. Prints CPU time, so that other work on the machine matters little.

python -m tests.bench.bench_gpt_step --nanogpt FOLDER

The folder is a checkout; without it, a plain net of GPT-2's shape takes its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.objective import Context
from tests.making import make_objective
from utils.measure import hardware
from utils.noise import Noise
from utils.spec import Spec

VOCABULARY = 256
Step = Callable[[], object]


class Size(NamedTuple):
    """A batch and a net."""

    rows: int
    length: int
    layers: int
    heads: int
    width: int


SIZES = {
    "12x64": Size(12, 64, 4, 4, 128),  # experiment=shakespeare and nanoGPT's CPU recipe
    "8x256": Size(8, 256, 6, 3, 192),
    "tiny": Size(2, 8, 1, 2, 16),
}
AS_GPT2 = -1
# what is added to experiment=shakespeare's keys
OURS: dict[str, dict[str, Any]] = {
    "ours": {"qk_norm": True},
    "ours, queries and keys not normed": {},
    "the same, MLP as large as GPT-2's": {"mlp_width": AS_GPT2},
}


class Plain(nn.Module):
    """GPT-2's block: layer norms, learned positions, GELU, no biases, as nanoGPT has it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.size = size
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(size.length, width)
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, bias=False) for _ in range(2 * size.layers + 1)
        )
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.maps = nn.ModuleList(
            nn.Linear(*shape, bias=False) for _ in range(size.layers) for shape in shapes
        )

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens_BL) + self.positions(torch.arange(tokens_BL.shape[1]))
        rows, length, width = x.shape
        for layer in range(self.size.layers):
            attend, mix, widen, narrow = self.maps[4 * layer : 4 * layer + 4]
            heads = attend(self.norms[2 * layer](x)).view(rows, length, 3 * self.size.heads, -1)
            query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + mix(mixed.transpose(1, 2).reshape(rows, length, width))
            x = x + narrow(F.gelu(widen(self.norms[2 * layer + 1](x))))
        logits = F.linear(self.norms[-1](x), self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())


def batch_of(size: Size) -> tuple[Tensor, Tensor]:
    """Random tokens and labels."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randint(VOCABULARY, (2, size.rows, size.length), generator=draw)
    return inputs, labels


def ours(size: Size, keys: dict[str, Any], dtype: torch.dtype) -> Step:
    """A step of our net."""
    if keys.get("mlp_width") == AS_GPT2:  # three matrices for two, in whole vectors
        keys = {**keys, "mlp_width": -(-8 * size.width // 3 // 16) * 16}
    spec = Spec(vocab_size=VOCABULARY, seq_len=size.length)
    objective = make_objective(
        "gpt",
        spec,
        num_layers=size.layers,
        hidden_size=size.width,
        num_heads=size.heads,
        tied=True,
        forward_dtype=str(dtype).removeprefix("torch."),
        **keys,
    )
    inputs, labels = batch_of(size)
    batch = {"inputs": inputs, "labels": labels}
    context = Context(0.0, Noise(0, 0, range(1), torch.device("cpu")))

    def step() -> None:
        objective.zero_grad()
        out = objective(batch, None, context)
        (out.loss / out.weight).backward()

    return step


def other(size: Size, folder: Path | None, dtype: torch.dtype) -> Step:
    """A step of nanoGPT's net, or of a plain one."""
    net = Plain(size) if folder is None else nanogpt(size, folder)
    inputs, labels = batch_of(size)

    def step() -> None:
        net.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = net(inputs, labels)[1]
        loss.backward()

    return step


def nanogpt(size: Size, folder: Path) -> nn.Module:
    """nanoGPT's net of this size, from a checkout."""
    found = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # its dataclass looks itself up
    found.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=size.length, vocab_size=VOCABULARY, n_layer=size.layers, n_head=size.heads,
        n_embd=size.width, dropout=0.0, bias=False,
    )  # fmt: skip
    return module.GPT(config)


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Returns the median CPU seconds of each step; they are taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn > 1:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--nanogpt", type=Path, help="a checkout")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["12x64", "8x256"])
    options.add_argument("--rounds", type=int, default=30)
    given = options.parse_args()
    if given.nanogpt is not None and not (given.nanogpt / "model.py").is_file():
        options.error(f"--nanogpt {given.nanogpt}: no checkout of nanoGPT (no model.py)")
    torch.set_num_threads(1)
    hardware.tune()
    name = "a plain GPT-2" if given.nanogpt is None else "nanoGPT"
    print("| rows × positions | net | float32, ms | bfloat16, ms |\n|---|---|---|---|")
    for chosen in given.sizes:
        size, columns = SIZES[chosen], []
        for dtype in (torch.float32, torch.bfloat16):
            steps = {each: ours(size, keys, dtype) for each, keys in OURS.items()}
            steps[name] = other(size, given.nanogpt, dtype)
            columns.append(measure(steps, given.rounds))
        for each in columns[0]:
            row = " | ".join(f"{1000 * column[each]:.1f}" for column in columns)
            print(f"| {size.rows} × {size.length} | {each} | {row} |", flush=True)


if __name__ == "__main__":
    main()
