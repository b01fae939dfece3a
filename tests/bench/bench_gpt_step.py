"""A language model's step, ours and nanoGPT's of one size.

python -m tests.bench.bench_gpt_step --nanogpt FOLDER
python -m tests.bench.bench_gpt_step --nanogpt FOLDER --device cuda

The folder is a checkout. On one CPU thread, forward and backward in turns, as CPU time, so that
other work on the machine matters little. On a GPU, whole training steps of GPT-2's small net, of
pretrain.py and as nanoGPT's train.py takes them, compiled, in bfloat16.
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
from torch import Tensor, nn

from models.objective import Context
from tests.gpu.parts import COLUMNS, measured
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
    vocabulary: int = VOCABULARY


SIZES = {
    "12x64": Size(12, 64, 4, 4, 128),  # experiment=shakespeare and nanoGPT's CPU recipe
    "8x256": Size(8, 256, 6, 3, 192),
}
ON_GPU = Size(16, 1024, 12, 12, 768, 50304)
ON_GPU_KEYS = [
    *("arch=gpt", "data=tokens", "optim=adamw", "grad_clip=1.0", "compile=true"),
    f"arch.num_layers={ON_GPU.layers}",
    f"arch.hidden_size={ON_GPU.width}",
    f"arch.num_heads={ON_GPU.heads}",
    *("arch.tied=true", "arch.mlp_width=2048"),  # as many weights as GPT-2 has
    f"data.seq_len={ON_GPU.length}",
    f"data.vocab_size={ON_GPU.vocabulary}",
    *("data.val_tokens=100000", "data.max_new_tokens=8"),
    f"global_batch_size={ON_GPU.rows}",
    *("max_steps=80", "log_interval=10", "eval_every_steps=null"),
]
AS_GPT2 = -1
# what is added to experiment=shakespeare's keys
OURS: dict[str, dict[str, Any]] = {
    "ours": {"qk_norm": True},
    "ours, queries and keys not normed": {},
    "the same, MLP as large as GPT-2's": {"mlp_width": AS_GPT2},
}


def batch_of(size: Size) -> tuple[Tensor, Tensor]:
    """Random tokens and labels."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randint(size.vocabulary, (2, size.rows, size.length), generator=draw)
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


def other(size: Size, folder: Path, dtype: torch.dtype) -> Step:
    """A step of nanoGPT's net."""
    net = nanogpt(size, folder)
    inputs, labels = batch_of(size)

    def step() -> None:
        net.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = net(inputs, labels)[1]
        loss.backward()

    return step


def on_gpu(folder: Path) -> None:
    """Prints ours, with its data and logs, and nanoGPT's on one batch."""
    print(f"| {COLUMNS} |\n|{'---|' * 5}", flush=True)
    print(f"| ours | {measured(ON_GPU_KEYS, 300)[0]} |", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    net = nanogpt(ON_GPU, folder).cuda()
    compiled = torch.compile(net)
    optimizer = net.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")  # type: ignore[operator]
    inputs, labels = (each.cuda() for each in batch_of(ON_GPU))
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(inputs, labels)[1]
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 10)
    step_s, peak = statistics.median(seconds[2:]), torch.cuda.max_memory_allocated() / 2**30
    print(f"| nanoGPT | {1e3 * step_s:.2f} | {ON_GPU.rows / step_s:,.0f} | – | {peak:.2f} |")


def nanogpt(size: Size, folder: Path) -> nn.Module:
    """nanoGPT's net of this size, from a checkout."""
    found = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # its dataclass looks itself up
    found.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=size.length, vocab_size=size.vocabulary, n_layer=size.layers, n_head=size.heads,
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
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = options.parse_args()
    if given.nanogpt is None:
        print("skipped: give --nanogpt FOLDER, a checkout of nanoGPT")
        return
    if given.device == "cuda":
        return on_gpu(given.nanogpt)
    torch.set_num_threads(1)
    hardware.tune()
    print("| rows × positions | net | float32, ms | bfloat16, ms |\n|---|---|---|---|")
    for chosen in given.sizes:
        size, columns = SIZES[chosen], []
        for dtype in (torch.float32, torch.bfloat16):
            steps = {each: ours(size, keys, dtype) for each, keys in OURS.items()}
            steps["nanoGPT"] = other(size, given.nanogpt, dtype)
            columns.append(measure(steps, given.rounds))
        for each in columns[0]:
            row = " | ".join(f"{1000 * column[each]:.1f}" for column in columns)
            print(f"| {size.rows} × {size.length} | {each} | {row} |", flush=True)


if __name__ == "__main__":
    main()
