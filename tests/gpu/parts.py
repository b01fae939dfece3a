"""The parts of `make gpu`."""

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.data.language.token_helpers import write_bin
from tests.ranks import ROOT
from tests.runs import Result, launched
from utils import revision

ALL_S = 780.0  # of all parts together
LIMIT_S = {1: 240.0, 2: 270.0, 3: ALL_S, 4: ALL_S}  # of a part
CUDA = torch.cuda.is_available()
TESTS = ["gpu/test_cuda.py", "test_host_never_waits.py", "test_memory_plan.py"]
NETS = {
    "HRM 27M": ["arch=hrm"],
    "TRM 7M, attention": ["arch=trm"],
    "TRM 5M, token mixing": ["arch=trm", "arch.mlp_t=true", "arch.pos_encodings=none"],
}
WAYS = {"compiled": "compile=true", "eager": "compile=false"}
GRAPHS = "TORCHINDUCTOR_CUDAGRAPHS=1"
DEMO = "experiment=demo epochs=null eval_interval=null eval_every_steps=null"
# random tokens, of GPT-2's vocabulary
GPT2 = """
    arch=gpt data=tokens grad_clip=1.0 arch.tied=true arch.mlp_width=2048
    arch.num_layers=12 arch.hidden_size=768 arch.num_heads=12 data.seq_len=1024
    data.vocab_size=50304 global_batch_size=16 eval_every_steps=null
"""
TINY_GPT2 = """
    arch.num_layers=1 arch.hidden_size=16 arch.num_heads=2 data.seq_len=16 arch.mlp_width=16
    arch.loss.chunk_tokens=100 data.vocab_size=256 eval_batch_size=512
"""
NINE = "size=9 blanks=50 train=64 num_aug=11 test=8"
TINY = (
    "arch.hidden_size=16 arch.H_cycles=1 arch.L_cycles=1 arch.num_heads=2 arch.expansion=1"
    " arch.halt_max_steps=2 global_batch_size=16"
)
MODULE = [sys.executable, "-m"]
SMALL = (
    "arch.hidden_size=8 arch.num_heads=2 global_batch_size=16 compile=false"
    " arch.loss.search_steps=8"
)
SEARCHES = ("arch.loss.beam=4", "arch.loss.beam=1 arch.loss.search_steps=64")
STEPS, WARM = 60, 2  # rows of ten steps that are left out
QUIET = ["wandb.mode=disabled", "checkpoint_minutes=null", "report=false", "trial=false"]
COLUMNS = "net, way | ms a step | examples/s | MFU | peak GiB"
BEGAN = time.monotonic()
Write = Callable[[str], None]


def is_it_right(write: Write) -> bool:
    """Part 1: the tests marked cuda."""
    write("## 1. Is it right\n\n`python -m pytest -m cuda`\n\n```")
    chosen = [] if CUDA else ["-k", "noise or trm_mlp"]
    if CUDA and importlib.util.find_spec("xdist"):
        chosen += ["-n", "6"]
    command = ["-m", "pytest", "-rfEs", "-m", "cuda", "-p", "no:cacheprovider", *chosen]
    command += [f"tests/{file}" for file in TESTS]
    rehearsed = [] if CUDA else ["REHEARSED_ON=cpu"]
    within_s = left_s(1)
    try:
        done = launched(["env", *rehearsed, sys.executable, *command], timeout=within_s)
        good, said = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        good, said = False, f"not done within {within_s:.0f} s"
    write(f"{said.strip()}\n```\n")
    return good


def how_fast(write: Write) -> bool:
    """Part 2: runs of the published sizes at 9×9, global batch 768, in bfloat16."""
    keys = [f"data.embedded.{each}" for each in NINE.split()]
    keys += ["epochs=null", "eval_interval=null", f"max_steps={STEPS}", "log_interval=10"]
    keys += ["arch.forward_dtype=bfloat16"] if CUDA else TINY.split()
    write(
        f"## 2. How fast\n\n`python pretrain.py {' '.join(keys)}` and the keys of the net;"
        f" medians from step {10 * WARM} on\n\n| {COLUMNS} |\n|{'---|' * 5}"
    )
    until, good = time.monotonic() + left_s(2), True
    ways = WAYS if CUDA else {"eager": WAYS["eager"]}
    nets = NETS if CUDA else dict([*NETS.items()][-1:])
    for way, how in ways.items():
        for net, of_net in nets.items():
            print(f"{net}, {way} …", flush=True)
            row, ended = measured([*keys, *of_net, how], until - time.monotonic())
            good &= ended
            write(f"| {net}, {way} | {row} |")
    return good


def what_helps(write: Write) -> bool:
    """Part 4: CUDA graphs, and a language model. With HRM and TRM, folders of the published code,
    their steps beside ours.
    """
    write(f"## 4. What helps\n\n`{GRAPHS}` replays CUDA graphs\n\n| {COLUMNS} |\n|{'---|' * 5}")
    until, good = time.monotonic() + left_s(4), True
    short = [f"max_steps={STEPS}", "log_interval=10"]
    short += ["compile=true", "arch.forward_dtype=bfloat16"] if CUDA else ["compile=false"]
    nine = [*(f"data.embedded.{key}" for key in NINE.split()), "epochs=null", "eval_interval=null"]
    tiny = [] if CUDA else TINY.split()
    nets = {"demo": [*DEMO.split(), *tiny]}
    nets |= {net: [*nine, *keys, *tiny] for net, keys in NETS.items()}
    with tempfile.TemporaryDirectory() as data:
        draws = np.random.default_rng(0)
        for name, count in (("train", 4_000_000), ("val", 100_000)):
            write_bin(Path(data, f"{name}.bin"), draws.integers(0, 50304 if CUDA else 256, count))
        of_gpt2 = [*GPT2.split(), f"data_path={data}", *([] if CUDA else TINY_GPT2.split())]
        for optim in ("adamw_matrices", "muon"):
            nets[f"GPT-2, optim={optim}"] = [*of_gpt2, f"optim={optim}"]
        for net, keys in nets.items():
            for graphs in ("", GRAPHS):
                if net in NETS and not graphs:
                    continue  # in part 2
                if not CUDA and net not in ("demo", "GPT-2, optim=muon"):
                    continue
                print(f"{net} {graphs} …", flush=True)
                row, ended = measured([*keys, *short], until - time.monotonic(), graphs)
                good &= ended
                write(f"| {net}{graphs and ', CUDA graphs'} | {row} |")
    if "HRM" in os.environ and "TRM" in os.environ:
        beside = ["--hrm", os.environ["HRM"], "--trm", os.environ["TRM"], "--device", "cuda"]
        command = [*MODULE, "tests.bench.bench_step", *beside, "--dtype", "bfloat16", "--nets"]
        for net in ("trm_mlp", "hrm", "trm"):
            within_s = until - time.monotonic()
            try:
                write(f"\n{launched([*command, net], timeout=max(1.0, within_s)).stdout}")
            except subprocess.TimeoutExpired:
                write(f"\n{net} beside the published code: not done within {within_s:.0f} s")
    return good


def left_s(part: int) -> float:
    """Returns the seconds that a part may take."""
    return min(LIMIT_S[part], ALL_S - (time.monotonic() - BEGAN))


def measured(arguments: list[str], within_s: float, variable: str = "") -> tuple[str, bool]:
    """Returns the cells of a run, or the last line that it printed instead; and whether it ended
    well.
    """
    if within_s < 20:
        return "no time was left | | |", False
    with tempfile.TemporaryDirectory() as scratch:
        command = [*arguments, *QUIET, f"checkpoint_path={scratch}/x"]
        words = ["env", *variable.split(), sys.executable, "pretrain.py", *command]
        try:
            done = launched(words, timeout=within_s)
        except subprocess.TimeoutExpired:
            return f"not done within {within_s:.0f} s | | |", False
        if done.returncode:
            said = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
            return f"{said[-1][:300].replace('|', '/')} | | |", False
        rows = [row for row in Result(Path(scratch, "x")).rows if "speed/step_ms" in row][WARM:]
    names = ("speed/step_ms", "speed/examples_per_s", "speed/mfu", "memory/peak_bytes")
    ms, examples, mfu, peak = (
        statistics.median(row.get(name, 0) for row in rows) for name in names
    )
    share = f"{mfu:.1%}" if mfu else "–"
    return f"{ms:.2f} | {examples:,.0f} | {share} | {peak / 2**30:.2f}", True


def what_it_reaches(write: Write) -> bool:
    """Part 3: trains experiment=sudoku_extreme on the boards of DATA (train.csv, test.csv) for
    TRAIN_S seconds, and searches for the answers of the test boards. KEYS are further keys.
    """
    if CUDA and "DATA" not in os.environ:
        write("## 3. What it reaches\n\nNot asked: give DATA=FOLDER with train.csv and test.csv\n")
        return True
    out = Path(os.environ.get("OUT") or ROOT)
    boards, run = ["--input-dir", os.environ.get("DATA", "")], out / "sudoku_extreme"
    keys = ["experiment=sudoku_extreme", *os.environ.get("KEYS", "").split()]
    train_s = float(os.environ.get("TRAIN_S", 90))
    if not CUDA:
        boards, train_s = ["--size", "9", "--train", "60", "--test", "20"], 10.0
        keys = ["experiment=sudoku_extreme", *SMALL.split()]
    with tempfile.TemporaryDirectory() as scratch:
        images = ["--num-aug", "1000" if CUDA else "1", "--validation", "200" if CUDA else "20"]
        done([*MODULE, "data.build.sudoku", *boards, *images, "--output-dir", f"{scratch}/boards"])
        keys += [f"data_path={scratch}/boards", *QUIET]
        probe = [*keys, "max_steps=60", "eval_every_steps=null", f"checkpoint_path={scratch}/probe"]
        done([sys.executable, "pretrain.py", *probe])
        rows = [row for row in Result(Path(scratch, "probe")).rows if "speed/step_ms" in row][WARM:]
        ms = statistics.median(row["speed/step_ms"] for row in rows)
        steps = int(1000 * train_s / ms)
        write(
            f"## 3. What it reaches\n\n`python pretrain.py {' '.join(keys)} max_steps={steps}`,"
            f" {ms:.1f} ms a step\n\n| evaluation | step | boards solved |\n|---|---|---|"
        )
        done([sys.executable, "pretrain.py", *keys, f"max_steps={steps}", f"checkpoint_path={run}"])
        best = run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()
        shutil.copy(best / "ema.safetensors", out)
        for number, way in enumerate(SEARCHES):
            asked = "eval_only=true data.eval_split=test compile=false max_steps=1"
            asked += f" checkpoint={best} checkpoint_path={scratch}/{number} {way}"
            done([sys.executable, "pretrain.py", *keys, *asked.split()])
            row = Result(Path(scratch, str(number))).rows[-1]
            low, high = (100 * row[f"eval/exact_accuracy_{end}"] for end in ("low", "high"))
            solved = f"{100 * row['eval/exact_accuracy']:.1f} % ({low:.1f}–{high:.1f})"
            write(f"| `{way}` | {best.name} | {solved} |")
    return True


def done(command: list[str]) -> None:
    """Runs a command to its good end."""
    within_s = left_s(3) + float(os.environ.get("TRAIN_S", 0))
    try:
        ended = launched(command, timeout=within_s)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command)}\nnot done within {within_s:.0f} s")
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")


def main() -> int:
    """Exit status 1 where something failed."""
    asked = os.environ.get("PART") or "1234"
    if not set(asked) <= set("1234"):
        sys.exit(f"PART={asked}: choose 1, 2, 3 or 4, or none for all")
    if not CUDA:
        print(
            "no CUDA device is here: this rehearses on the CPU with tiny sizes, and measures"
            " nothing",
            flush=True,
        )
    out = Path(os.environ.get("OUT") or ROOT)
    out.mkdir(parents=True, exist_ok=True)
    file = out / ("gpu-results.md" if CUDA else "gpu-rehearsal.md")
    device = torch.cuda.get_device_name() if CUDA else "no GPU: a rehearsal"
    versions = f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
    with file.open("w") as text:

        def write(lines: str) -> None:
            text.write(f"{lines}\n")
            text.flush()

        write(f"{device}; {versions}, {os.cpu_count()} cores\n\n{revision.summary()}")
        parts = {"1": is_it_right, "2": how_fast, "3": what_it_reaches, "4": what_helps}
        good = [parts[number](write) for number in sorted(set(asked))]
    print(f"results: {file}", flush=True)
    return int(not all(good))
