"""launch/*.sh as a user starts them, and rules for all files in launch/; tests/slurm has what needs
Slurm.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, started, until
from tests.runs import EXACT, QUIET, TINY_TRM, Once, Result, digest, launched, status
from utils.rundir.status import state_of

SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix != ".md")
RUN = [*TINY_TRM, *EXACT, "epochs=null", "eval_interval=null", "max_steps=40", *QUIET]


@pytest.fixture
def alone(once: Once) -> str:
    """The digest of one undisturbed process."""
    return digest(once(*RUN).directory)


def script(
    name: str, *arguments: str, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script's end, with variables as they stand before a command."""
    words = [f"{key}={value}" for key, value in {"PYTHON": sys.executable, **variables}.items()]
    return launched(["env", *words, str(ROOT / "launch" / name), *arguments], cwd=cwd)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_they_are_called(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 80
    called = path.name != "job.sh"
    assert os.access(path, os.X_OK) == called
    assert not called or any(
        line.startswith("#  ") and f"launch/{path.name} " in line for line in lines
    ), "a line to copy"
    if shutil.which("shellcheck"):
        done = launched(["shellcheck", "-x", str(path)])
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "variables", "said"),
    [
        ("local.sh", {"RANKS": "0"}, "RANKS=0: must be a number of processes"),
        ("mpirun.sh", {"MPIRUN": "nompi"}, "MPIRUN=nompi: not found"),
        ("mpirun.sh", {"MPIRUN": "false"}, "MPIRUN=false: neither Open MPI nor MPICH"),
        ("local.sh", {"PYTHON": "x/python"}, "PYTHON=x/python: not found; run make setup, or give"),
        ("mpirun.sh", {"PYTHON": "x/python"}, "PYTHON=x/python: not found"),
        ("elastic.sh", {"PYTHON": "x/python"}, "PYTHON=x/python: not found"),
        ("local.sh", {"RESTARTS": "some"}, "RESTARTS=some: must be a number"),
        ("chain.sh", {}, "how many jobs?"),
        ("elastic.sh", {}, "STORE=: must be HOST:PORT, as launch/elastic.sh store prints it"),
        ("elastic.sh", {"STORE": "x:1", "RANKS": "0"}, "RANKS=0: must be a number; for example"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, variables: dict[str, str], said: str) -> None:
    done = script(name, *(["learning_rate=1"] if name != "chain.sh" else []), **variables)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_local_ranks_are_the_same_run_from_any_folder(alone: str, tmp_path: Path) -> None:
    done = script("local.sh", *RUN, "checkpoint_path=run", cwd=tmp_path, RANKS="2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks by torchrun" in done.stdout
    assert digest(tmp_path / "run") == alone


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_an_mpi_run_is_killed_and_goes_on_with_more_ranks(
    mpirun: str, alone: str, tmp_path: Path
) -> None:
    if not shutil.which(mpirun):
        pytest.skip(f"no {mpirun} here")
    variables = {**os.environ, "PYTHON": sys.executable, "MPIRUN": mpirun, "RANKS": "2"}
    path = f"checkpoint_path={tmp_path}/run"
    command = [str(ROOT / "launch" / "mpirun.sh"), *RUN, "checkpoint_interval=3", path]
    process = started(command, env=variables)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 6, 60)
        os.kill(status(tmp_path / "run")["pid"], signal.SIGKILL)
        assert process.wait(40) != 0
        assert until(lambda: state_of(tmp_path / "run") in ("failed", "lost"))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    again = script("mpirun.sh", *RUN, f"checkpoint_path={tmp_path}/run", MPIRUN=mpirun, RANKS="4")
    assert again.returncode == 0, again.stderr
    assert "continued at step" in again.stdout
    assert "4 ranks by" in again.stdout
    assert digest(tmp_path / "run") == alone
    assert [row["step"] for row in Result(tmp_path / "run").rows if "train/loss" in row] == list(
        range(1, 41)
    )
