"""The parts of `make gpu`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from data.build.common import write_dataset
from data.recursive.puzzle_files import PuzzleSet, PuzzleSplit, read_split
from tests.gpu.results import Results
from tests.ranks import ROOT
from tests.runs import launched
from utils import revision

LIMIT_S = {1: 450.0, 2: 540.0}  # of a part; the third has its minutes
CUDA = torch.cuda.is_available()
RIGHT, BROKEN, SPEED, KERNELS, LEARNING = (
    "1. Is it right",
    "What failed",
    "2. How fast",
    "Where the time goes",
    "3. Does it learn",
)
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
# Published for Sudoku-Extreme, where there is no recipe of our own
SUDOKU = [
    *NETS["TRM 5M, token mixing"],
    "lr=1e-4",
    "puzzle_emb_lr=1e-4",
    "weight_decay=1.0",
    "puzzle_emb_weight_decay=1.0",
    "ema=true",
    "epochs=50000",
]
QUIET = ["wandb.mode=disabled", "checkpoint_minutes=null", "resume=false"]
HELD_OUT = 2000  # boards: the whole of Sudoku-Extreme's takes longer than training has


class Recorder:
    """Sees pytest's tests end one by one."""

    def __init__(self, results: Results, limit_s: float) -> None:
        self._results, self._until, self._seconds = results, time.monotonic() + limit_s, 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = self._results.done(RIGHT)
        items[:] = [item for item in items if item.name not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        self._seconds = (0.0 if report.when == "setup" else self._seconds) + report.duration
        if report.failed:
            self._results.begin(BROKEN, "The ends of what pytest said.\n")
            self._results.add(
                BROKEN, name, f"### {name}\n\n```\n{report.longreprtext[-3000:]}\n```"
            )
        elif report.when == "call":
            self._results.drop(BROKEN, name)
        if report.when == "call" or report.outcome != "passed":
            self._results.add(
                RIGHT,
                name,
                f"| {name} | {report.outcome} | {self._seconds:.1f} |",
                good=report.passed,
            )

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            item.session.shouldstop = "the part's time is over; a rerun does the rest"


def is_it_right(results: Results) -> bool:
    """Part 1: the tests marked cuda."""
    results.begin(RIGHT, "`python -m pytest -m cuda`\n\n| test | outcome | s |\n|---|---|---|")
    chosen = [] if CUDA else ["-k", "noise or trm_mlp"]
    if not CUDA:
        os.environ["REHEARSED_ON"] = "cpu"
    command = [
        "-q",
        "-m",
        "cuda",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        *chosen,
        str(ROOT / "tests" / "gpu" / "test_cuda.py"),
    ]
    return pytest.main(command, plugins=[Recorder(results, LIMIT_S[1])]) in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )


def how_fast(results: Results) -> bool:
    """Part 2: steps of the published sizes at 9×9, global batch 768, in bfloat16."""
    columns = (
        "net, way | parameters | first step, s | ms a step (fastest) | examples/s | TFLOP a step |"
        " MFU | peak GiB | host waits a step"
    )
    dtype = ["arch.forward_dtype=bfloat16"] if CUDA else []
    head = (
        f"`python -m tests.gpu.speed FILE {' '.join([*NINE, *dtype])}` and the keys of the net;"
        " medians of 30 steps"
    )
    results.begin(SPEED, f"{head}\n\n| {columns} |\n|{'---|' * 9}")
    results.begin(
        KERNELS, "One step under the profiler: calls, ms and share of the kernels that take most.\n"
    )
    until, good = time.monotonic() + LIMIT_S[2], True
    for way, how in WAYS.items() if CUDA else [("eager", WAYS["eager"])]:
        for net, keys in (
            NETS.items()
            if CUDA
            else [("TRM 5M, token mixing", [*NETS["TRM 5M, token mixing"], *TINY])]
        ):
            name = f"{net}, {way}"
            if name in results.done(SPEED):
                continue
            print(f"{name} …", flush=True)
            figures = measured(
                [*NINE, *dtype, *keys, how, "epochs=null", "eval_interval=null", "max_steps=1000"],
                until - time.monotonic(),
            )
            if isinstance(figures, str):
                good = False
                results.add(SPEED, name, f"| {name} | {figures} |{' |' * 7}", good=False)
                continue
            waits = "–" if figures["waits"] is None else str(sum(figures["waits"].values()))
            mfu = f"{figures['mfu']:.1%}" if figures["mfu"] else "–"
            kernels = "\n".join(
                f"{n:6} {ms:9.3f} {share:6.1%}  {key[:90]}"
                for key, n, ms, share in figures["kernels"]
            )
            waiting = [f"{where} ×{n}" for where, n in (figures["waits"] or {}).items()]
            said = f"```\n{kernels}\n```\nThe host waits at: {', '.join(waiting) or '–'}\n"
            results.add(KERNELS, name, f"### {name}\n\n{said}")
            results.add(
                SPEED,
                name,
                f"| {name} | {figures['parameters']:,} | {figures['first_step_s']:.1f} |"
                f" {figures['step_ms']:.2f} ({figures['fastest_ms']:.2f}) |"
                f" {figures['examples_per_s']:,.0f} | {figures['flops'] / 1e12:.2f} | {mfu} |"
                f" {figures['peak_bytes'] / 2**30:.2f} | {waits} |",
            )
    return good


def measured(arguments: list[str], within_s: float) -> dict | str:
    """Returns the results of tests.gpu.speed, or the last line that it printed instead."""
    if within_s < 20:
        return "no time was left; a rerun does it"
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
            said = f"not done within {within_s:.0f} s; a rerun tries again"
        return json.loads(file.read_text()) if file.exists() else said


def does_it_learn(results: Results) -> bool:
    """Part 3: Sudoku-Extreme by wall clock."""
    minutes = float(os.environ.get("MINUTES") or 8)
    if f"{minutes:g} minutes" in results.done(LEARNING):
        return True
    with tempfile.TemporaryDirectory() as scratch:
        data, said = dataset(Path(scratch))
        own = (ROOT / "conf" / "experiment" / "sudoku_extreme.yaml").exists()
        recipe = ["experiment=sudoku_extreme"] if own else SUDOKU
        rhythm = (
            ["eval_every_steps=500", "eval_batch_size=1000"]
            if CUDA
            else [*TINY[:7], "eval_every_steps=5", "max_steps=10"]
        )
        run = Path(scratch, "run")
        command = [*recipe, *data, *rhythm, *QUIET, f"checkpoint_path={run}"]
        results.begin(
            LEARNING,
            f"`python pretrain.py {' '.join(command)}`\n\n{said}. Minutes count from that command"
            " on, with importing, compiling and evaluating; the run is cut off.\n\n| minutes |"
            " step | loss | exact accuracy, held out | accuracy |\n|---|---|---|---|---|",
            afresh=True,
        )
        began = time.time()
        with open(Path(scratch, "said"), "w+") as log:
            train = [sys.executable, "pretrain.py", *command]
            process = subprocess.Popen(
                train, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while process.poll() is None and time.time() < began + 60 * minutes:
                    time.sleep(1)
                    note_curve(results, run / "metrics.jsonl", began)
            finally:
                with suppress(ProcessLookupError):
                    # what it would save is of no use to anybody
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            note_curve(results, run / "metrics.jsonl", began)
            log.seek(0)
            if (
                process.returncode not in (0, -signal.SIGKILL)
                or not (run / "metrics.jsonl").exists()
            ):
                results.add(LEARNING, "failed", f"\n```\n{log.read()[-3000:]}\n```", good=False)
                return False
    results.add(LEARNING, f"{minutes:g} minutes", "")
    return True


def dataset(scratch: Path) -> tuple[list[str], str]:
    """DATA with a part of its held-out boards, or generated boards: keys, and what they are."""
    if given := os.environ.get("DATA"):
        test = read_split(f"DATA={given}", Path(given), "test")
        write_dataset(
            scratch / "part",
            {
                "test": PuzzleSplit(
                    "", test.metadata, {name: part(one) for name, one in test.sets.items()}
                )
            },
            [],
        )
        return [
            "data_path=null",
            f"data_paths=[{given}]",
            f"data_paths_test=[{scratch}/part]",
        ], f"Of the held-out boards the first {HELD_OUT:,}"
    size = "--size 9 --blanks 56 --num-aug 1000" if CUDA else "--size 4 --train 32 --test 16"
    command = [
        sys.executable,
        "-m",
        "data.build.sudoku",
        *size.split(),
        "--output-dir",
        str(scratch / "boards"),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return (
        [f"data_path={scratch}/boards"],
        (
            "Not Sudoku-Extreme (DATA= was not given) but boards of `python -m data.build.sudoku"
            f" {size}`"
        ),
    )


def part(one: PuzzleSet) -> PuzzleSet:
    """The first groups of a set."""
    groups = one.group_indices[: HELD_OUT + 1]
    puzzles = one.puzzle_indices[: groups[-1] + 1]
    rows = slice(0, puzzles[-1])
    return PuzzleSet(
        one.inputs[rows], one.labels[rows], one.puzzle_identifiers[: groups[-1]], puzzles, groups
    )


def note_curve(results: Results, file: Path, began: float) -> None:
    """Every evaluation so far, with the loss before it."""
    loss = float("nan")
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        loss = row.get("train/loss") or loss
        if "eval/exact_accuracy" in row:
            values = (
                f"{row['step']:,} | {loss:.4f} | {row['eval/exact_accuracy']:.4f} |"
                f" {row['eval/accuracy']:.4f}"
            )
            results.add(
                LEARNING,
                str(row["step"]),
                f"| {(row['time'] - began) / 60:.2f} | {values} |",
                good=False,
            )


def main() -> int:
    """Exit status 1 where something failed."""
    out, asked = Path(os.environ.get("OUT") or ROOT), os.environ.get("PART") or "123"
    if not set(asked) <= set("123"):
        sys.exit(f"PART={asked}: choose 1, 2 or 3, or none for all")
    if not CUDA:
        print(
            "no CUDA device is here: this rehearses on the CPU with tiny sizes, and measures"
            " nothing",
            flush=True,
        )
    results = Results(out / ("gpu-results.md" if CUDA else "gpu-rehearsal.md"))
    device = (
        torch.cuda.get_device_name() if CUDA else "no GPU: a rehearsal, whose figures say nothing"
    )
    versions = (
        f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores"
    )
    results.begin("Machine", f"{device}; {versions}\n\n{revision.summary()}")
    parts = {"1": is_it_right, "2": how_fast, "3": does_it_learn}
    good = [parts[number](results) for number in sorted(set(asked))]
    print(f"results: {results.file}", flush=True)
    return int(not all(good))
