"""A language model's step, ours and nanoGPT's of one size.

python -m tests.bench.bench_gpt_step --nanogpt FOLDER
python -m tests.bench.bench_gpt_step --nanogpt FOLDER --device cuda

The folder is a checkout. On one CPU thread, forward and backward in turns, as CPU time, so that
other work on the machine matters little. On a GPU, whole training steps of GPT-2's small net on
random tokens, of pretrain.py and as nanoGPT's train.py takes them, compiled, in bfloat16. Both nets
have one vocabulary and equally many weights, and both take the fused AdamW.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from contract import Context, Noise, Spec
from data.source import source_of
from models.objective import make_objective as build
from optim.groups import build_dense
from tests.data.language.token_helpers import write_bin
from tests.gpu.parts import COLUMNS, measured
from tests.making import make_objective
from tests.ranks import words
from tests.runs import config_of
from utils.measure import hardware
from utils.plan.needs import META

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
    "12x64": Size(12, 64, 4, 4, 128),  # nanoGPT's CPU recipe
    "8x256": Size(8, 256, 6, 3, 192),
}
ON_GPU = Size(16, 1024, 12, 12, 768, 50304)
AS_GPT2 = -1
# what is added to the keys of the same size
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


def ours(size: Size, keys: dict[str, Any], dtype: torch.dtype) -> tuple[Step, int]:
    """A step of our net, and how many weights it has."""
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

    return step, sum(p.numel() for p in objective.parameters())


def other(size: Size, folder: Path, dtype: torch.dtype) -> tuple[Step, int]:
    """A step of nanoGPT's net, and how many weights it has besides its positions."""
    net: Any = nanogpt(size, folder)
    inputs, labels = batch_of(size)

    def step() -> None:
        net.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = net(inputs, labels)[1]
        loss.backward()

    return step, net.get_num_params()


def keys_of(size: Size, data: str) -> list[str]:
    """Writes random tokens into a folder. Returns the keys of a run on them whose net has as many
    weights as GPT-2's of this size, but for the positions, which are rotations.
    """
    draws = np.random.default_rng(0)
    for name, tokens in (("train", 4_000_000), ("val", 100_000)):
        write_bin(Path(data, f"{name}.bin"), draws.integers(0, size.vocabulary, tokens))
    return words(f"""
        arch=gpt data=tokens optim=adamw_matrices grad_clip=1.0 compile=true
        arch.forward_dtype=bfloat16 arch.tied=true arch.mlp_width={8 * size.width // 3}
        arch.num_layers={size.layers} arch.hidden_size={size.width} arch.num_heads={size.heads}
        data.seq_len={size.length} data.vocab_size={size.vocabulary} data_path={data}
        global_batch_size={size.rows} max_steps=80 log_interval=10 eval_every_steps=null
    """)


def check_same_work(keys: list[str], net: Any, optimizer: torch.optim.Optimizer) -> None:
    """Our run, as these keys describe it, and nanoGPT's have nets and updates of one size."""
    config = config_of(*keys)
    source = source_of(config.plain())
    objective = build(config.arch, config.seed, source.spec, META)
    vocabulary, weights = source.spec.vocab_size, sum(p.numel() for p in objective.parameters())
    assert vocabulary == net.config.vocab_size
    assert weights == net.get_num_params(), "which leaves out learned positions; ours has none"
    (own,) = build_dense(config.optim["dense"], dict(objective.named_parameters()))
    for each in (own, optimizer):
        assert isinstance(each, torch.optim.AdamW)
        assert all(group["fused"] for group in each.param_groups)


def whole_steps(folder: Path, size: Size = ON_GPU, device: str = "cuda") -> None:
    """Prints ours, with its data and logs, and nanoGPT's on one batch."""
    torch.backends.cuda.matmul.allow_tf32 = True
    net: Any = nanogpt(size, folder).to(device)
    compiled = torch.compile(net)
    optimizer = net.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")  # the fused one
    print(f"| {COLUMNS} |\n|{'---|' * 5}", flush=True)
    with tempfile.TemporaryDirectory() as data:
        keys = keys_of(size, data)
        check_same_work(keys, net, optimizer)
        print(f"| ours | {measured(keys, 300)[0]} |", flush=True)
    inputs, labels = (each.to(device) for each in batch_of(size))
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(10):
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(inputs, labels)[1]
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 10)
    step_s, peak = statistics.median(seconds[2:]), torch.cuda.max_memory_allocated() / 2**30
    print(f"| nanoGPT | {1e3 * step_s:.2f} | {size.rows / step_s:,.0f} | – | {peak:.2f} |")


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
        return whole_steps(given.nanogpt)
    torch.set_num_threads(1)
    hardware.tune()
    print(
        "| rows × positions | net | weights | float32, ms | bfloat16, ms |\n|---|---|---|---|---|"
    )
    for chosen in given.sizes:
        size, columns = SIZES[chosen], []
        for dtype in (torch.float32, torch.bfloat16):
            nets = {each: ours(size, keys, dtype) for each, keys in OURS.items()}
            nets["nanoGPT"] = other(size, given.nanogpt, dtype)
            columns.append(measure({each: step for each, (step, _) in nets.items()}, given.rounds))
        for each, (_, weights) in nets.items():
            row = " | ".join(f"{1000 * column[each]:.1f}" for column in columns)
            print(f"| {size.rows} × {size.length} | {each} | {weights:,} | {row} |", flush=True)


if __name__ == "__main__":
    main()
