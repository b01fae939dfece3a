"""A training step's forward and backward on one CPU thread or one GPU, eager and compiled; with
checkouts of the published code, beside it.

`python -m tests.bench.bench_step --hrm FOLDER --trm FOLDER` (they want einops and pydantic, and get
PyTorch's `scaled_dot_product_attention` in place of flash-attn, as the table says). On a GPU, ours
also replays CUDA graphs. Every way is a separate process, and steps are taken in turn, so that
other load on the machine affects all alike. Steps are CPU time, on a GPU ten by the clock;
compiling, without a cache, is by the clock.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from tests.bench.checkouts import check_checkout
from tests.bench.turns import Process, serve
from tests.ranks import words
from utils.errors import exit_status

SIZES = words("""
    halt_exploration_prob=0.1 halt_max_steps=16 hidden_size=512 num_heads=8 expansion=4.0
    puzzle_emb_ndim=512
""")
TRM = [
    *SIZES,
    *words("H_cycles=3 L_cycles=6 H_layers=0 L_layers=2 puzzle_emb_len=16 no_ACT_continue=true"),
]
MIXING = words("mlp_t=true pos_encodings=none")
DEMO = words("""
    hidden_size=128 num_heads=4 expansion=2.0 puzzle_emb_ndim=128 puzzle_emb_len=1 halt_max_steps=8
    H_cycles=1 L_cycles=2
""")
KEYS = {
    "hrm": [*SIZES, *words("H_cycles=2 L_cycles=2 H_layers=4 L_layers=4 pos_encodings=rope")],
    "trm": [*TRM, "pos_encodings=rope"],
    "trm_mlp": [*TRM, *MIXING],
    "demo": [*TRM, *DEMO, *MIXING],
}
NETS: dict[str, Any] = {
    net: OmegaConf.to_container(OmegaConf.from_dotlist(keys)) for net, keys in KEYS.items()
}
# tokens, vocabulary, batch
DATA = {net: (36, 8, 32) if net == "demo" else (81, 11, 16) for net in NETS}
GPU_BATCH = 384  # as HRM is published for one GPU; four processes share its memory
WAYS = ["published, eager", "published, compiled", "ours, eager", "ours, compiled"]
GRAPHS = "ours, CUDA graphs"
FIRST = 2  # steps that compile: the second one has carries of other strides


def ours(net: str, dtype: str, compiled: bool, device: str) -> Callable[[], None]:
    import torch

    from contract import Context, Noise
    from data.recursive.puzzles import PuzzleSpec
    from models.objective import tables_of
    from tests.making import make_objective
    from utils.measure import hardware

    hardware.tune()
    tokens, vocabulary, _ = DATA[net]
    spec = PuzzleSpec(vocab_size=vocabulary, seq_len=tokens, table_rows=1)
    keys = {"forward_dtype": dtype, **NETS[net]}
    objective = make_objective("hrm" if net == "hrm" else "trm", spec, **keys).to(device)
    if compiled:
        objective.compile_net()
    batch = batch_of(net, device)
    carry = objective.initial_carry(batch)
    context = Context(0.0, Noise(0, 0, range(1), torch.device(device)))

    def step() -> None:
        nonlocal carry
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        objective.zero_grad()
        out = objective(batch, carry, context)
        out.loss.backward()
        carry = out.carry
        for table in tables_of(objective).values():
            table.take_row_grads()

    return step


def published(net: str, dtype: str, compiled: bool, device: str, folder: str) -> Callable[[], None]:
    import torch
    import torch.nn.functional as F

    def attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
        ).transpose(1, 2)

    sys.modules["flash_attn"] = module = ModuleType("flash_attn")
    module.flash_attn_func = attend  # type: ignore[attr-defined]
    _give_way_to(folder)
    if net == "hrm":
        from models.hrm.hrm_act_v1 import HierarchicalReasoningModel_ACTV1 as Net  # type: ignore[import-not-found]
    else:
        from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1 as Net  # type: ignore[import-not-found]
    from models.losses import ACTLossHead  # type: ignore[attr-defined]

    tokens, vocabulary, _ = DATA[net]
    batch = batch_of(net, device)
    size = len(batch["inputs"])
    spec = {
        "batch_size": size,
        "seq_len": tokens,
        "vocab_size": vocabulary,
        "num_puzzle_identifiers": 1,
        "forward_dtype": dtype,
    }
    with torch.device(device):
        head = ACTLossHead(Net({**NETS[net], **spec}), "stablemax_cross_entropy").train()
        carry = head.initial_carry(batch)
    called = torch.compile(head, dynamic=False) if compiled else head

    def step() -> None:
        nonlocal carry
        head.zero_grad()
        carry, loss, *_ = called(return_keys=[], carry=carry, batch=batch)
        (loss / size).backward()

    return step


def _give_way_to(folder: str) -> None:
    """Finds `models` and `utils` in a checkout of the published code.

    There they are folders without `__init__.py`, and any package of these names on the path would
    win. This process runs nothing else of ours.
    """
    root = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [folder, *(path for path in sys.path if os.path.realpath(path or ".") != root)]
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("models", "utils"):
            del sys.modules[name]


def batch_of(net: str, device: str) -> dict[str, Any]:
    import torch

    tokens, vocabulary, size = DATA[net]
    if device == "cuda":
        size = GPU_BATCH
    inputs, labels = (
        torch.randint(1, vocabulary, (size, tokens), dtype=torch.int32) for _ in range(2)
    )
    puzzles = torch.zeros(size, dtype=torch.int32)
    batch = {"inputs": inputs, "labels": labels, "puzzle_identifiers": puzzles}
    return {key: tensor.to(device) for key, tensor in batch.items()}


def serve_way(net: str, way: str, dtype: str, device: str, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiled = way == GRAPHS or way.endswith("compiled")
    if way.startswith("published"):
        step = published(net, dtype, compiled, device, folder)
    else:
        step = ours(net, dtype, compiled, device)

    def of_gpu() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    serve(step, of_gpu if device == "cuda" else time.process_time)


def compare(net: str, dtype: str, device: str, rounds: int, folder: str) -> None:
    ways = [way for way in WAYS if folder or way.startswith("ours")]
    ways += [GRAPHS] if device == "cuda" else []
    command = [sys.executable, "-m", "tests.bench.bench_step", "--serve", net]
    uncached = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    processes = [
        Process(
            [*command, way, dtype, device, folder],
            TORCHINDUCTOR_CUDAGRAPHS=str(int(way == GRAPHS)),
            **uncached,
        )
        for way in ways
    ]
    first = []
    for process in processes:
        began = time.perf_counter()
        process.seconds(FIRST)
        first.append(time.perf_counter() - began)
    steps = 10 if device == "cuda" else 1
    turns = [[process.seconds(steps) for process in processes] for _ in range(rounds)]
    for process in processes:
        process.end()
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    for way, median, until in zip(ways, medians, first, strict=True):
        compiling = "" if way.endswith("eager") else f"{until - FIRST * median:.0f}"
        if way.startswith("published"):
            way += ", without flash-attn"
        times = f"{medians[0] / median:.2f}"
        print(f"| {net} | {way} | {median * 1e3:.1f} | {times} | {compiling} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hrm", default="", help="a checkout of the published HRM")
    parser.add_argument("--trm", default="", help="a checkout of the published TRM")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=[*NETS])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve_way(*asked.serve)
    for option, folder in (("--hrm", asked.hrm), ("--trm", asked.trm)):
        if folder:
            check_checkout(option, folder, "models/losses.py")
    print(
        f"| net | way | ms per step, {asked.dtype} | times as fast as the first |"
        " compiling, s |\n|---|---|---|---|---|"
    )
    for net in asked.nets:
        folder = asked.hrm if net == "hrm" else asked.trm
        compare(net, asked.dtype, asked.device, asked.rounds, folder)


if __name__ == "__main__":
    sys.exit(exit_status(main))
