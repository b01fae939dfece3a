"""The parts of `make gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.ranks import ROOT
from tests.runs import launched
from utils import revision

LIMIT_S = {1: 450.0, 2: 540.0}  # of a part
CUDA = torch.cuda.is_available()
NETS = {
    "HRM 27M": ["arch=hrm"],
    "TRM 7M, attention": ["arch=trm"],
    "TRM 5M, token mixing": ["arch=trm", "arch.mlp_t=true", "arch.pos_encodings=none"],
}
WAYS = {"eager": "compile=false", "compiled": "compile=true", "compile=max": "compile=max"}
NINE = [
    "data.embedded.size=9",
    "data.embedded.blanks=50",
    "data.embedded.train=64",
    "data.embedded.num_aug=11",
    "data.embedded.test=8",
]
TINY = [
    "arch.hidden_size=16",
    "arch.H_cycles=1",
    "arch.L_cycles=1",
    "arch.num_heads=2",
    "arch.expansion=1",
    "arch.halt_max_steps=2",
    "global_batch_size=16",
    "data.embedded.size=4",
    "data.embedded.blanks=3",
]
QUIET = ["wandb.mode=disabled", "checkpoint_minutes=null", "resume=false"]
COLUMNS = (
    "net, way | parameters | first step, s | ms a step (fastest) | examples/s | TFLOP a step |"
    " MFU | peak GiB | host waits a step"
)
Write = Callable[[str], None]


def is_it_right(write: Write) -> bool:
    """Part 1: the tests marked cuda."""
    write("## 1. Is it right\n\n`python -m pytest -m cuda`\n\n```")
    chosen = [] if CUDA else ["-k", "noise or trm_mlp"]
    command = ["-rfEs", "-m", "cuda", "-p", "no:cacheprovider", *chosen]
    env = os.environ if CUDA else {**os.environ, "REHEARSED_ON": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *command, str(ROOT / "tests/gpu/test_cuda.py")],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S[1],
            check=False,
        )
        good, said = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as error:
        good, said = False, f"{(error.stdout or b'').decode()}\nnot done within {LIMIT_S[1]:.0f} s"
    write(f"{said.strip()}\n```\n")
    return good


def how_fast(write: Write) -> bool:
    """Part 2: steps of the published sizes at 9×9, global batch 768, in bfloat16."""
    dtype = ["arch.forward_dtype=bfloat16"] if CUDA else []
    write(
        f"## 2. How fast\n\n`python -m tests.gpu.speed FILE {' '.join([*NINE, *dtype])}` and the"
        f" keys of the net; medians of 30 steps\n\n| {COLUMNS} |\n|{'---|' * 9}"
    )
    until, kernels, good = time.monotonic() + LIMIT_S[2], list[str](), True
    mixing = "TRM 5M, token mixing"
    ways = WAYS if CUDA else {"eager": WAYS["eager"]}
    nets = NETS if CUDA else {mixing: [*NETS[mixing], *TINY]}
    for name, keys, how in [
        (f"{net}, {way}", keys, how) for way, how in ways.items() for net, keys in nets.items()
    ]:
        print(f"{name} …", flush=True)
        long = [how, "epochs=null", "eval_interval=null", "max_steps=1000"]
        figures = measured([*NINE, *dtype, *keys, *long], until - time.monotonic())
        if isinstance(figures, str):
            good = False
            write(f"| {name} | {figures} |{' |' * 7}")
            continue
        waits = "–" if figures["waits"] is None else str(sum(figures["waits"].values()))
        mfu = f"{figures['mfu']:.1%}" if figures["mfu"] else "–"
        write(
            f"| {name} | {figures['parameters']:,} | {figures['first_step_s']:.1f} |"
            f" {figures['step_ms']:.2f} ({figures['fastest_ms']:.2f}) |"
            f" {figures['examples_per_s']:,.0f} | {figures['flops'] / 1e12:.2f} | {mfu} |"
            f" {figures['peak_bytes'] / 2**30:.2f} | {waits} |"
        )
        rows = [
            f"{n:6} {ms:9.3f} {share:6.1%}  {key[:90]}" for key, n, ms, share in figures["kernels"]
        ]
        waiting = [f"{where} ×{n}" for where, n in (figures["waits"] or {}).items()]
        kernels += [f"### {name}", "", "```", *rows, "```"]
        kernels += [f"The host waits at: {', '.join(waiting) or '–'}", ""]
    head = "One step under the profiler: calls, ms and share of the kernels that take most."
    write("\n".join(["", "## Where the time goes", "", head, "", *kernels]))
    return good


def measured(arguments: list[str], within_s: float) -> dict | str:
    """Returns the results of tests.gpu.speed, or the last line that it printed instead."""
    if within_s < 20:
        return "no time was left"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "found.json")
        command = [
            sys.executable,
            "-m",
            "tests.gpu.speed",
            str(file),
            *arguments,
            *QUIET,
            f"checkpoint_path={scratch}/run",
        ]
        try:
            done = launched(command, timeout=within_s)
            said = (
                (done.stderr or done.stdout).strip().splitlines()
                or [f"exit status {done.returncode}"]
            )[-1][:300].replace("|", "/")
        except subprocess.TimeoutExpired:
            said = f"not done within {within_s:.0f} s"
        return json.loads(file.read_text()) if file.exists() else said


def main() -> int:
    """Exit status 1 where something failed."""
    asked = os.environ.get("PART") or "12"
    if not set(asked) <= set("12"):
        sys.exit(f"PART={asked}: choose 1 or 2, or none for both")
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
        parts = {"1": is_it_right, "2": how_fast}
        good = [parts[number](write) for number in sorted(set(asked))]
    print(f"results: {file}", flush=True)
    return int(not all(good))
