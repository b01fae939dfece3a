"""Real runs of pretrain.py, and what they left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch.testing import assert_close

from tests.ranks import (
    ROOT,
    Completed,
    check_ended_well,
    clean_env,
    free_port,
    run_ranks,
    started,
    words,
)
from utils.checkpoint import reader
from utils.command import config, keys
from utils.command.arguments import prepare
from utils.command.naming import SweepJob
from utils.command.root import Config
from utils.ranks.launchers import Launch

# A TRM with everything that could depend on the ranks: carry, exploration, Q bootstrapping, puzzle
# rows, averages. float64: recursion amplifies rounding, which in float32 would drown what is to be
# compared.
TINY_TRM = words("""
    arch=trm arch.hidden_size=16 arch.num_heads=2 arch.expansion=1 arch.H_cycles=1 arch.L_cycles=2
    arch.L_layers=1 arch.halt_max_steps=4 arch.puzzle_emb_len=1 arch.no_ACT_continue=false
    arch.halt_exploration_prob=0.3 arch.forward_dtype=float64 ema=true ema_rate=0.9
    data.embedded.size=4 data.embedded.blanks=3 data.embedded.train=64 data.embedded.test=37
    global_batch_size=24 epochs=24 eval_interval=24 eval_batch_size=8 lr=1e-2 lr_warmup_steps=5
    puzzle_emb_lr=1e-3
""")
# noise in training and in evaluations
NOISY = words("""
    arch.random_start=true arch.damping=0.05 arch.path_noise=0.1 arch.eval_noise=0.3 arch.chains=3
""")
# guesses, some of them corrected, boards of different lengths
TINY_CANDIDATES = words("""
    arch=candidates optim=adamw arch.hidden_size=12 arch.num_heads=2 arch.passes=2
    arch.forward_dtype=float64 arch.loss.search_steps=12 ema=true ema_rate=0.9
    data.embedded={size:4,blanks:9,train:64,test:37} global_batch_size=24 epochs=24 eval_interval=24
    lr=1e-2 lr_warmup_steps=5
""")
# a field of state for each digit
TINY_SYMBOLS = words("""
    arch=symbols arch.hidden_size=8 arch.num_heads=2 arch.halt_max_steps=4 optim=muon
    arch.forward_dtype=float64 data.embedded={size:4,blanks:3,train:64,test:37} ema=true
    ema_rate=0.9 global_batch_size=24 lr=1e-2 epochs=24 eval_interval=24 lr_warmup_steps=5
""")
TINY_CNN = words("""
    arch=cnn data=digits optim=adadelta arch.forward_dtype=float64 global_batch_size=32 epochs=1
    eval_interval=1 eval_examples=64 lr=1.0
""")
TINY_GPT = words("""
    arch=gpt data=tokens arch.num_layers=2 arch.hidden_size=16 arch.num_heads=2 arch.kv_heads=1
    arch.mlp_width=24 arch.forward_dtype=float64 arch.loss.chunk_tokens=100 data.seq_len=16
    data.val_tokens=500 data.max_new_tokens=8 data.embedded.mebibytes=1 global_batch_size=24
    max_steps=23 eval_batch_size=8 lr=1e-2 lr_warmup_steps=5
""")
TINY_TMS = words("""
    experiment=tms_target arch.forward_dtype=float64 global_batch_size=64 max_steps=40
    data.held_out=64
""")
# all that can train; arch.readers is to be added: the nets of TINY_GPT and TINY_PAIRS
TINY_PREFIX = words("""
    arch=prefix data=passages optim=adamw data.passage_len=8 data.text=5 data.val_passages=100
    data.embedded={mebibytes:1,bpe:null} arch.latents=3 arch.wire=6 arch.deep=true
    arch.encoder={width:16,layers:1,heads:2,refiner:1,states:false} arch.loss.teacher=0.5
    arch.loss.gist=0.1 arch.forward_dtype=float64 global_batch_size=24 max_steps=23
    eval_batch_size=34 lr=1e-2 lr_warmup_steps=5
""")
# another reader of the same texts, in other tokens
TINY_PAIRS = [*TINY_GPT, *words("data.embedded.bpe=300 arch.hidden_size=24 arch.kv_heads=2")]
# every loss, so that every kind of noise counts; its target is the net of TINY_TMS
TINY_COMPONENTS = words("""
    experiment=tms_5_2 arch.forward_dtype=float64 global_batch_size=48 max_steps=23
    data.held_out=100 eval_every_steps=null data.probability=0.3 arch.C=8 eval_batch_size=16
    arch.loss.warmup_steps=10 arch.loss.subset=1 arch.loss.minimality=1e-2 arch.loss.p=2
    arch.loss.p_end=0.9 grad_clip=2
""")
# the same of the net of TINY_GPT
GPT_COMPONENTS = words("""
    experiment=decompose_lm arch.forward_dtype=float64 arch.C=6 data.seq_len=16 data.val_tokens=500
    data.embedded.mebibytes=1 tokens_per_update=null global_batch_size=24 max_steps=23
    arch.loss.layerwise=1 eval_every_steps=10 eval_batch_size=8
""")
FLOAT32 = ["arch.forward_dtype=float32"]
EXACT = [*FLOAT32, "exact=true"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Without this Open MPI kills one second after its signal; with it, it also waits as long before it
# passes the signal on.
PATIENT = ["--mca", "odls_base_sigkill_timeout", "4"]
MPIRUN = ["mpirun", *PATIENT, "--allow-run-as-root", "-np", "2", "--oversubscribe"]
MPIRUN += ["--bind-to", "none", sys.executable]
# Two ranks to which something happens.
TROUBLED = [
    *TINY_TRM, *FLOAT32,
    *words("max_steps=23 log_interval=4 checkpoint_interval=5 timeout_s=8 num_workers=1"),
]  # fmt: skip
# Stopped after step 10, it is in the middle of an epoch and of a logging interval, with slots that
# think on.
INTERRUPTED = [*TINY_TRM, *FLOAT32, "max_steps=23", "log_interval=4", "num_workers=1"]
STOPPED = 143
BOUND_S = 8 + 5  # timeout_s, and what it takes to say so
# faults count calls of the objective, so the laws are tried where tests ask for it
QUIET = ["wandb.mode=disabled", "log_interval=1", "timeout_s=60", "report=false", "trial=false"]


def config_of(
    *overrides: str, job: list[str] | None = None, sweep: str = "", ranks: int = 1
) -> Config:
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        raw = compose("pretrain", prepare(overrides), return_hydra_config=True)
        of_sweep = None if job is None else SweepJob(job, sweep)
        return config.resolve(raw, raw.hydra.runtime.choices, Launch(world_size=ranks), of_sweep)


@dataclass
class Result:
    """Files of one run."""

    directory: Path
    stdout: str = ""

    @property
    def rows(self) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def weights(self, group: str = "model") -> dict[str, torch.Tensor]:
        return reader.load(self.directory, [group])[0][group]


Once = Callable[..., Result]  # the fixture of conftest.py, called as `train` without a folder


def train(directory: Path, *arguments: str, ranks: int = 1, timeout: float = 120) -> Result:
    """A run on so many ranks, started with the plain environment variables."""
    line = ["pretrain.py", *QUIET, f"checkpoint_path={directory}", *arguments]
    done = check_ended_well(run_ranks(ranks, line, timeout))
    assert not any(rank.stdout for rank in done[1:]), "rank 0 alone has something to say"
    return Result(directory, done[0].stdout)


def faulty(
    directory: Path,
    fault: str,
    rank: int | str,
    when: int | str,
    *arguments: str,
    ranks: int = 1,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[Completed]:
    """A run in which something goes wrong; what tests/faults.py knows."""
    return run_ranks(ranks, planted(directory, fault, rank, when, *arguments), timeout, env)


def planted(
    directory: Path, fault: str, rank: int | str, when: int | str, *arguments: str
) -> list[str]:
    """Returns the arguments of Python for a run in which something goes wrong."""
    path = f"checkpoint_path={directory}"
    return ["-m", "tests.faults", fault, str(rank), str(when), *QUIET, path, *arguments]


def stopped(directory: Path, *arguments: str, ranks: int = 1) -> list[Completed]:
    """A run that somebody stops after ten steps."""
    when = 9 * (8 // ranks if "exact=true" in arguments else 1)
    done = faulty(directory, "SIGTERM@objective", "all", when, *arguments, ranks=ranks)
    assert {rank.returncode for rank in done} == {STOPPED}, done[0].stderr
    latest = (directory / "checkpoints" / "latest").read_text()
    # a GPU hears of it one step later, and counted a step's operations by one call more
    assert latest == "step_10\n" or (latest == "step_11\n" and "device=cuda" in arguments)
    return done


def learned(result: Result) -> list[dict]:
    """All logged metrics but times and speeds."""
    kept = ("step", "train/", "eval/")
    return [
        {name: value for name, value in row.items() if name.startswith(kept)} for row in result.rows
    ]


def assert_same_bits(one: Result, other: Result) -> None:
    """Everything in the last checkpoint and every logged metric is equal to the last bit."""
    assert digest(one.directory) == digest(other.directory)
    assert learned(one) == learned(other)


def goes_on(directory: Path, undisturbed: Result, ranks: int = 2) -> None:
    """The same command again, and the troubled run becomes the undisturbed one."""
    assert_same_bits(train(directory, *TROUBLED, ranks=ranks), undisturbed)


def status(directory: Path) -> dict[str, Any]:
    """Why a run ended."""
    return json.loads((directory / "status.json").read_text())


def torchrun(
    ranks: int, *arguments: str, cwd: Path = ROOT, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """The same script under torchrun, from any folder."""
    return launched(
        [*TORCHRUN, "--nproc-per-node", str(ranks), str(ROOT / "pretrain.py"), *arguments],
        cwd,
        timeout,
    )


def launched(
    command: Sequence[str], cwd: Path = ROOT, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """A launcher's end, and that of all who write where it does: of ranks that outlive it too."""
    env = clean_env(MASTER_PORT=str(free_port()), PET_MASTER_PORT=str(free_port()))
    process = started(command, cwd, env)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def seconds_since(done: list[Completed]) -> float:
    """How long ago the planted fault happened first; asked at once after the end of the last
    rank.
    """
    moments = re.findall(r"^FAULT \S+ (\S+)$", "".join(rank.stdout for rank in done), re.MULTILINE)
    return time.monotonic() - min(map(float, moments))


def digest(path: Path) -> str:
    """Returns what `python -m utils.checkpoint digest` prints."""
    return reader.digest(path)


def assert_same_run(one: Result, other: Result, atol: float = 1e-6) -> None:
    """The same metrics at every step, the same evaluation, the same weights and averages."""
    mine, theirs = learned(one), learned(other)
    assert [[*row] for row in mine] == [[*row] for row in theirs]
    assert_close(mine, theirs, rtol=0, atol=atol)
    assert sum("train/loss" in row for row in mine) >= 20, "too short to show anything"
    if (one.directory / "checkpoints" / "latest").exists():
        for group in {"model", "ema"} & {*reader.open_checkpoint(one.directory).groups}:
            assert_close(one.weights(group), other.weights(group), rtol=0, atol=atol)
