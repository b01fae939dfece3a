"""launch/*.slurm on a real Slurm of two nodes: whatever happens to a job, the run's digest is that
of one undisturbed process.
"""

import csv
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import ROOT, until, words
from tests.runs import EXACT, QUIET, TINY_TRM, Once, digest, status, train
from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing()), reason=missing())]

RUN = [*TINY_TRM, *EXACT, "epochs=null", "eval_interval=null", "max_steps=200", *QUIET]
EVERYWHERE = ["-N2", "--exclusive"]
FULL_NODES = ["-N2", "--ntasks-per-node=2"]  # as many as a node has CPUs


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        made.env["PYTHON"] = sys.executable
        yield made


@pytest.fixture
def alone(once: Once) -> str:
    """The digest of one undisturbed process."""
    return digest(once(*RUN).directory)


def leave_nothing(slurm: Cluster) -> None:
    """End what is still there, which leaves no file behind."""
    slurm.ask("scancel", "--user=root")
    assert until(lambda: not slurm.ask("squeue", "-h"), 30)
    assert not list(ROOT.glob(".lockstep-*"))


@pytest.fixture
def folder(tmp_path: Path, slurm: Cluster) -> Iterator[Path]:
    yield tmp_path / "run"
    leave_nothing(slurm)


def steps(folder: Path) -> int:
    """How many steps have been logged."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("train/loss") if file.exists() else 0


def trains(slurm: Cluster, job: str, folder: Path, after: int = 0) -> None:
    """Wait until a run is some steps further."""
    slurm.wait(job, lambda: steps(folder) >= after + 5)


@pytest.mark.parametrize("script", ["run", "torchrun"])
def test_a_run_over_two_nodes_makes_way_for_a_job_of_higher_priority_and_goes_on(
    script: str, slurm: Cluster, alone: str, folder: Path
) -> None:
    ranks = "--ntasks-per-node=2" if script == "run" else "--ntasks-per-node=1"
    line = [*EVERYWHERE, ranks, f"launch/{script}.slurm", *RUN, f"checkpoint_path={folder}"]
    job = slurm.submit(*line, env={"RANKS_PER_NODE": "2"})
    trains(slurm, job, folder)
    other = slurm.submit(*EVERYWHERE, "-p", "high", "--wrap", "true")
    assert slurm.ended(other) == "COMPLETED"
    slurm.starts_again(job)
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert digest(folder) == alone
    assert "to be run again" in slurm.log(job)
    assert "; queued again" in slurm.log(job)
    assert f"continued at step {status_step(slurm, job)}" in slurm.log(job)


def test_a_run_that_a_preemption_only_asks_to_end_is_queued_again_all_the_same(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """As sites without `preempt_send_user_signal` have it: SIGTERM to the ranks, which also means
    scancel.
    """
    with cluster(tmp_path_factory.mktemp("slurm"), signals_at_preemption=False) as slurm:
        slurm.env["PYTHON"] = sys.executable
        job = slurm.submit(*EVERYWHERE, "launch/run.slurm", *RUN, f"checkpoint_path={tmp_path}/run")
        trains(slurm, job, tmp_path / "run")
        slurm.submit(*EVERYWHERE, "-p", "high", "--wrap", "true")
        slurm.wait(job, lambda: "SIGTERM after step" in slurm.log(job))
        slurm.wait(job, lambda: slurm.about(job, "Restarts") == "1")
        leave_nothing(slurm)


def status_step(slurm: Cluster, job: str) -> str:
    """After which step the job said that it was interrupted."""
    return slurm.log(job).partition("SIGUSR1 after step ")[2].partition(":")[0]


def test_a_run_whose_time_is_over_goes_on_with_one_node_instead_of_two(
    slurm: Cluster, alone: str, folder: Path, tmp_path: Path
) -> None:
    """Slurm looks at time limits every half minute only: until it is stopped, the run goes
    slowly.
    """
    slow, python = tmp_path / "slow", tmp_path / "python"
    slow.touch()
    python.write_text(
        f"#!/bin/sh\n[ -e {slow} ] && shift && exec {sys.executable} -m tests.faults slow@objective"
        f' all 0- "$@"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    limit = ["-t", "1", "--signal=B:USR1@10"]
    line = [*FULL_NODES, *limit, "launch/run.slurm", *RUN, f"checkpoint_path={folder}"]
    job = slurm.submit(*line, env={"PYTHON": str(python)})
    slurm.wait(job, lambda: "; queued again" in slurm.log(job))
    assert (status(folder)["state"], status(folder)["exit_status"]) == ("requeue", 138)
    slow.unlink()
    slurm.starts_again(job, "NumNodes=1", "NumTasks=2", "NumCPUs=2", "TimeLimit=5")
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert (slurm.about(job, "NumNodes"), slurm.about(job, "Restarts")) == ("1", "1")
    assert "4 ranks by srun" in slurm.log(job)
    assert "2 ranks by srun" in slurm.log(job)
    assert digest(folder) == alone


def test_a_cancelled_run_saves_and_is_not_queued_again(
    slurm: Cluster, alone: str, folder: Path
) -> None:
    job = slurm.submit(*EVERYWHERE, "launch/run.slurm", *RUN, f"checkpoint_path={folder}")
    trains(slurm, job, folder)
    slurm.ask("scancel", job)
    assert slurm.ended(job) == "CANCELLED"
    slurm.wait(job, lambda: status(folder)["state"] == "stopped")
    assert status(folder)["exit_status"] == 143
    assert digest(train(folder, *RUN).directory) == alone  # by hand, without Slurm


@pytest.mark.parametrize("by", ["requeue", "node failure"])
def test_a_run_that_slurm_itself_queues_again_says_so_and_goes_on(
    by: str, slurm: Cluster, alone: str, folder: Path
) -> None:
    job = slurm.submit(*FULL_NODES, "launch/run.slurm", *RUN, f"checkpoint_path={folder}")
    trains(slurm, job, folder)
    if by == "requeue":
        slurm.ask("scontrol", "requeue", job)
    else:
        slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait(job, lambda: "; Slurm has queued it again" in slurm.log(job))
    if by == "node failure":
        # it may have come back by itself
        slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    slurm.starts_again(job)
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert "not queued again" not in slurm.log(job)
    assert digest(folder) == alone


def test_a_start_without_a_step_is_the_last(slurm: Cluster, folder: Path) -> None:
    job = slurm.submit("launch/run.slurm", *RUN, f"checkpoint_path={folder}")
    slurm.wait(job, lambda: slurm.about(job, "JobState") == "RUNNING")
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    assert slurm.ended(job) == "FAILED"
    assert "; not queued again" in slurm.log(job)
    assert slurm.about(job, "Restarts") == "0"
    assert steps(folder) == 0


def test_torchrun_starts_the_ranks_of_both_nodes_again_when_one_is_killed(
    slurm: Cluster, alone: str, folder: Path
) -> None:
    often = ["checkpoint_interval=3", f"checkpoint_path={folder}"]
    job = slurm.submit(*EVERYWHERE, "launch/torchrun.slurm", *RUN, *often)
    trains(slurm, job, folder)
    os.kill(status(folder)["pid"], 9)
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert "continued at step" in slurm.log(job)
    assert digest(folder) == alone


@pytest.mark.parametrize("by", ["line", "number"])
def test_an_array_sweeps_and_one_job_that_fails_is_not_queued_again(
    by: str, slurm: Cluster, tmp_path: Path, folder: Path
) -> None:
    lines = tmp_path / "sweep.txt"
    lines.write_text("seed=1\nseed=2 lr=-1\nseed=3 'arch.forward_dtype=float32'\nlrr=1\n")
    sweep = [str(lines)] if by == "line" else ["lr=1e-2,-1,2e-2"]
    fixed = [key for key in RUN if not key.startswith("lr=")]
    fixed += words(f"max_steps=3 hydra.sweep.dir={tmp_path}/sweep project_name={tmp_path.name}")
    fixed.append(f"checkpoint_path={tmp_path}/runs/${{seed}}-${{lr}}")
    array = "--array=1-4" if by == "line" else "--array=1-3"
    job = slurm.submit(array, "launch/sweep.slurm", *sweep, *fixed)
    states = [slurm.ended(f"{job}_{task}") for task in (1, 2, 3)]
    logs = [(slurm.logs / f"{job}-{task}.log").read_text() for task in (1, 2, 3)]
    assert states == ["COMPLETED", "FAILED", "COMPLETED"], logs
    assert "lr=-1" in logs[1]
    assert "; not queued again" in logs[1]
    ends = [status(path)["state"] for path in (tmp_path / "runs").iterdir()]
    assert ends == ["finished", "finished"]
    if by == "line":
        assert slurm.ended(f"{job}_4") == "FAILED"
        unknown = (slurm.logs / f"{job}-4.log").read_text()
        assert "error: lrr: unknown key" in unknown
    else:  # each line is a sweep
        with open(tmp_path / "sweep" / "jobs.csv") as file:
            ends = sorted(row["state"] for row in csv.DictReader(file))
        assert ends == ["failed", "finished", "finished"]


def test_a_chain_goes_on_until_the_run_is_finished_and_ends_there(
    slurm: Cluster, alone: str, folder: Path
) -> None:
    where = ["-p", "low", f"--output={slurm.logs}/%A-%a.log"]
    chain = slurm.ask(
        "launch/chain.sh", "4", *where, "launch/run.slurm", *RUN, f"checkpoint_path={folder}"
    ).split()
    assert len(chain) == 4
    trains(slurm, chain[0], folder)
    slurm.ask("scancel", "--batch", "--signal=USR1", chain[0])
    assert slurm.ended(chain[0]) == "FAILED", "its exit status is 138"
    assert "the next job of" in slurm.log(chain[0])
    assert slurm.ended(chain[1]) == "COMPLETED"
    assert digest(folder) == alone
    assert [slurm.ended(job) for job in chain[2:]] == ["CANCELLED", "CANCELLED"]


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun_finds_the_nodes_of_its_job(
    mpirun: str, slurm: Cluster, tmp_path: Path, folder: Path
) -> None:
    if not shutil.which(mpirun):
        pytest.skip(f"no {mpirun} here")
    few = [*RUN, "max_steps=3"]
    line = " ".join(["launch/mpirun.sh", *few, f"checkpoint_path={folder}"])
    job = slurm.submit(
        *EVERYWHERE, "--ntasks-per-node=1", "--wrap", line, env={"MPIRUN": mpirun, "RANKS": "2"}
    )
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert f"2 ranks by {mpirun.removeprefix('mpirun.')}" in slurm.log(job)
    assert digest(folder) == digest(train(tmp_path / "alone", *few).directory)


def test_one_process_stays_one(slurm: Cluster, tmp_path: Path) -> None:
    """Plain python in a batch script, and a step of one task."""
    few = " ".join([*RUN, "max_steps=3"])
    line = (
        f"$PYTHON pretrain.py {few} checkpoint_path={tmp_path}/plain && srun -n1 $PYTHON"
        f" pretrain.py {few} checkpoint_path={tmp_path}/step"
    )
    job = slurm.submit("-N1", "--wrap", line)
    assert slurm.ended(job) == "COMPLETED", slurm.log(job)[-3000:]
    assert digest(tmp_path / "plain") == digest(tmp_path / "step")
