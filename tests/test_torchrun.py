"""Runs under a launcher: it restarts what was killed, hands on signals, or dies itself."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, free_port
from tests.runs import (
    MPIRUN,
    TORCHRUN,
    TROUBLED,
    Once,
    Result,
    assert_same_bits,
    digest,
    goes_on,
    launched,
    planted,
    status,
)

pytestmark = pytest.mark.slow
# than four starts that end within 12 steps each
LONGER = [*TROUBLED, "max_steps=71", "checkpoint_interval=3"]
TWO = [*TORCHRUN, "--nproc-per-node", "2"]
USR1_TOO = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
NEEDS_MPIRUN = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here")


@pytest.mark.parametrize("seed", range(0, 20, 4))
def test_torchrun_restarts_a_run_whose_ranks_are_killed(
    seed: int, once: Once, tmp_path: Path
) -> None:
    """Four kills each, of either rank, at different steps and moments."""
    fault = planted(tmp_path / "run", "kill@objective", "random", seed, *LONGER)
    done = launched([*TWO, "--max-restarts", "4", *fault])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("FAULT kill") == 4
    assert_same_bits(Result(tmp_path / "run"), once(*LONGER, ranks=2))


def test_torch_distributed_launch_works(undisturbed_pair: Result, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    command = [*launch, str(ROOT / "pretrain.py"), *TROUBLED, f"checkpoint_path={tmp_path}/run"]
    done = launched(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert digest(tmp_path / "run") == digest(undisturbed_pair.directory)


def test_two_agents_restart_a_run_though_only_that_of_the_killed_rank_counts(
    undisturbed_pair: Result, tmp_path: Path
) -> None:
    meets = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    meets += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = [*TORCHRUN, *meets, "--nproc-per-node", "1", "--max-restarts", "1"]
    fault = planted(tmp_path / "run", "kill@objective", 0, 12, *TROUBLED)
    both = '"$@" & "$@"; ended=$?; wait $! && exit $ended'
    done = launched(["bash", "-c", both, "-", *agent, *fault])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FAULT kill" in done.stdout
    assert "could not meet" not in done.stderr  # that would cost another restart
    # on a busy machine the checkpoint of step 10 may not be whole when its writer is killed
    assert re.search("continued at step (5|10)\n", done.stdout), done.stdout
    assert digest(tmp_path / "run") == digest(undisturbed_pair.directory)


@pytest.mark.parametrize(
    ("launcher", "signal", "state"),
    [
        (TWO, "SIGTERM", "stopped"),
        (TWO, "SIGINT", "stopped"),
        ([*TWO, USR1_TOO], "SIGUSR1", "requeue"),
        (TWO, "SIGKILL", "stopped"),
        pytest.param(MPIRUN, "SIGTERM", "stopped", marks=NEEDS_MPIRUN),
        pytest.param(MPIRUN, "SIGUSR1", "requeue", marks=NEEDS_MPIRUN),
    ],
    ids=lambda value: value if isinstance(value, str) else Path(value[0]).stem,
)
def test_a_signal_to_the_launcher_is_one_to_the_run(
    launcher: list[str], signal: str, state: str, undisturbed_pair: Result, tmp_path: Path
) -> None:
    began = time.monotonic()
    fault = planted(tmp_path / "run", f"launcher:{signal}@objective", 1, 7, *TROUBLED)
    done = launched([*launcher, *fault])
    happened = float(done.stdout.split(f"FAULT launcher:{signal} ")[1].split()[0])
    assert began < happened < time.monotonic() < happened + 20, "torchrun kills after 30 s"
    told = status(tmp_path / "run")
    assert (told["state"], told["step"]) == (state, 8), done.stderr
    goes_on(tmp_path / "run", undisturbed_pair)
