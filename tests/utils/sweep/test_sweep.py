"""`python pretrain.py -m`: jobs as processes, one failing, some at once, stopped and gone on with,
and the table of them all.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.ranks import LAUNCHER_PREFIXES, ROOT, check_ended_well, run_line, run_ranks, until
from tests.runs import FLOAT32, STOPPED, TINY_TRM, Result, digest, status, train
from utils.errors import Stopped
from utils.ranks.launchers import Launch
from utils.sweep.jobs import Job
from utils.sweep.launcher import Multirun

SHORT = [
    *TINY_TRM,
    *FLOAT32,
    "wandb.mode=disabled",
    "global_batch_size=16",
    "epochs=null",
    "eval_interval=null",
    "eval_every_steps=20",
]
LONG = "max_steps=4000"


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """As a user starts it."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*LAUNCHER_PREFIXES, "RANK", "WORLD_SIZE", "MASTER_"))
    }
    env |= {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(ROOT / "pretrain.py"), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def sweep(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Its exit status, and what it said."""
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def summary(folder: Path) -> list[dict[str, str]]:
    """The table of the only sweep there."""
    (file,) = folder.glob("runs/multirun/*/summary.csv")
    return list(csv.DictReader(file.open()))


def begun(folder: Path, runs: int) -> bool:
    """Returns whether this number of runs have taken steps."""
    return until(
        lambda: (
            len(
                [
                    file
                    for file in folder.glob("runs/puzzles/*/metrics.jsonl")
                    if file.stat().st_size
                ]
            )
            >= runs
        ),
        within=60,
    )


def test_a_failing_job_does_not_end_a_sweep(tmp_path: Path) -> None:
    """Two at once; what the table says is what the runs have left, and their names are those of one
    rank's run.
    """
    code, out, err = sweep(
        tmp_path,
        "-m",
        "seed=0,x,1",
        "sweep.jobs=2",
        *SHORT,
        "max_steps=8",
        "eval_every_steps=4",
        "run_name=me${hydra:job.num}",
    )
    assert code == 2, err
    assert err.splitlines() == [
        "error: job 2: seed=x: must be a whole number, for example 0",
        "1 of 3 jobs failed: job 2; the same command goes on with what is not finished",
    ]
    assert out.index("job 3 of 3: seed=1") < out.index("held out: "), (
        "both are started before one has ended"
    )
    assert "\n1: step 8, held out: " in out
    assert "\n3: step 8, held out: " in out
    rows = summary(tmp_path)
    assert [(row["job"], row["overrides"], row["state"], row["steps"]) for row in rows] == [
        ("1", "seed=0", "finished", "8"),
        ("2", "seed=x", "failed", ""),
        ("3", "seed=1", "finished", "8"),
    ]
    assert [row["directory"].partition("-")[0] for row in rows] == [
        "runs/puzzles/me0",
        "",
        "runs/puzzles/me2",
    ]
    for row in (rows[0], rows[2]):
        values = Result(tmp_path / row["directory"]).series("eval/exact_accuracy")
        assert (row["metric"], float(row["value"]), float(row["best"])) == (
            "eval/exact_accuracy",
            values[-1],
            max(values),
        )
        assert len(values) == 2
    assert "summary: runs/multirun/seed-" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-m", "sweep.jobs=0", "seed=0,1"], "error: sweep.jobs=0: must be at least 1"),
        (["-m", "seed=0,1", "lr=fast"], "error: lr=fast: must be a number"),
        (["-m", "seed=0,1", "sweep.only=3"], "error: sweep.only=3: the sweep has 2 jobs"),
        (
            ["-m", "seed=0,1", "sweep.only=1,null"],
            "error: sweep.only=1,null: says how all jobs are run",
        ),
        (
            ["seed=1", "sweep.only=1"],
            "error: sweep.only=1: chooses a job of a sweep, and this is none; add -m",
        ),
        (
            ["-m", "lr=interval(1e-4,1e-2)"],
            "error: interval(…): a range that somebody must draw from; add hydra/sweeper=optuna",
        ),
        (
            ["-m", "seed=0,1", "sweep.jobs=2", "hydra/launcher=basic"],
            "error: sweep.jobs=2: is for hydra/launcher=local",
        ),
        (
            ["-m", "seed=0,1", "sweep.on_error=maybe"],
            "error: sweep.on_error=maybe: must be continue or stop",
        ),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    (done,) = run_line(arguments, tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs" / "puzzles").exists()


@pytest.mark.parametrize("key", ["sweep.jobs", pytest.param("sweep.ranks", marks=pytest.mark.slow)])
def test_ranks_that_a_launcher_has_started_run_jobs_together(key: str, tmp_path: Path) -> None:
    ranks = run_line(["-m", "seed=0,1", f"{key}=2"], tmp_path, 2)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert (
        f"error: {key}=2: 2 ranks run jobs together; start one process for that" in ranks[0].stderr
    )
    assert sum(rank.stderr.count("\n") for rank in ranks) == 1


NOT_YET = """
import os, signal, sys
from omegaconf import DictConfig, OmegaConf
from utils.errors import Stopped
from utils.sweep import children
from utils.sweep.jobs import Job

config = OmegaConf.create({"checkpoint_path": "run", "eval_only": False})
children.command = lambda options, job, ranks: [sys.executable, "-c", "import time; time.sleep(60)"]
jobs, statuses = [Job(number, [], DictConfig({}), DictConfig({}), config) for number in (1, 2)], []

def next_job(busy):
    if busy:
        os.kill(os.getpid(), signal.SIGUSR1)
    return None if busy else jobs.pop(0)

def on_end(job, status):
    statuses.append(status)

try:
    children.Children([], [{}, {}], 1).run(next_job, on_end)
except Stopped as stopped:
    print(stopped.signum, *statuses, len(jobs), children._name(63))
"""


def test_a_job_that_does_not_listen_yet_is_interrupted_too(tmp_path: Path) -> None:
    """The signal kills it; that is no failure."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", NOT_YET],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [f"{signal.SIGUSR1:d}", "138", "1", "signal", "63"], done.stderr


@pytest.mark.parametrize(
    ("further", "error", "status", "told"),
    [
        (
            True,
            Stopped(signal.SIGUSR1, "SIGUSR1: the sweep has stopped"),
            0,
            ("requeue", "SIGUSR1: the sweep has stopped", 138),
        ),
        (
            False,
            Stopped(signal.SIGUSR1, ""),
            0,
            ("stopped", "SIGUSR1: no job came further, so not to be run again", 138),
        ),
        (True, Stopped(signal.SIGTERM, "SIGTERM"), 0, ("stopped", "SIGTERM", 143)),
        (True, None, 2, ("failed", "seed=x: must be a whole number", 2)),
        (True, None, 0, ("finished", "", 0)),
    ],
)
def test_a_batch_script_reads_how_the_sweep_ended(
    further: bool,
    error: Stopped | None,
    status: int,
    told: tuple[str, str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATUS", str(tmp_path / "copy.json"))
    finished, wrong = (Job(number, [], DictConfig({}), DictConfig({}), None) for number in (1, 2))
    wrong.error = "seed=x: must be a whole number"
    multirun = Multirun(
        Launch(),
        [],
        [finished, wrong],
        failures={2: 2} if status else {},
        advanced=[finished] if further else [],
    )
    multirun.conclude(error, status)
    assert json.loads((tmp_path / "copy.json").read_text()) == dict(
        zip(("state", "reason", "exit_status"), told, strict=True)
    )
    assert f'\n "reason": "{told[1]}",\n' in (tmp_path / "copy.json").read_text(), (
        "as job.sh reads it"
    )


@pytest.mark.parametrize(
    ("state", "status", "evaluates", "since", "further"),
    [
        ("finished", 0, False, 1, True),
        ("requeue", 138, False, 1, True),
        ("stopped", 0, False, 1, True),
        ("finished", 0, False, -1, False),
        ("stopped", 143, False, 1, False),
        ("finished", 0, True, 1, False),
    ],
)
def test_a_job_that_was_finished_before_is_no_progress(
    state: str, status: int, evaluates: bool, since: int, further: bool, tmp_path: Path
) -> None:
    """Else a sweep of which only finished jobs fit into the time would be queued for ever. (A
    pruned trial has stopped well: 0.)
    """
    config = OmegaConf.create({"checkpoint_path": str(tmp_path), "eval_only": evaluates})
    job = Job(1, [], DictConfig({}), DictConfig({}), config, begun=1000.0, evaluation=tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "heartbeat": 1000.0 + since}))
    multirun = Multirun(Launch(), [], [job])
    multirun.record_end(job, status)
    assert bool(multirun.advanced) == further


def test_jobs_that_share_gpus_are_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    multirun = Multirun(Launch(), [])
    multirun.children(OmegaConf.create({"ranks": 1}), 2, "cuda")
    assert capsys.readouterr().err == ""
    multirun.children(OmegaConf.create({"ranks": 1}), 3, "cuda")
    assert (
        capsys.readouterr().err
        == "sweep.jobs=3: jobs share 2 GPUs; with sweep.jobs=2 each would have its own\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_a_stopped_sweep_goes_on(signum: int, code: int, tmp_path: Path) -> None:
    """Its jobs save, and no step is done twice: the bits are those of runs that nobody stopped."""
    command = ["-m", "seed=0,1,2", "sweep.jobs=2", *SHORT, "max_steps=120", "log_interval=2"]
    process = start(tmp_path, *command, LOCKSTEP_STATUS=str(tmp_path / "copy.json"))
    assert begun(tmp_path, 2)
    assert not (tmp_path / "copy.json").exists(), "a job does not speak for the sweep"
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert json.loads((tmp_path / "copy.json").read_text())["state"] == (
        "requeue" if code == 138 else "stopped"
    )
    assert (
        f"{signal.Signals(signum).name}: the sweep has stopped; the same command goes on with it"
        in err
    )
    assert "Traceback" not in out + err
    state = "requeue" if code == 138 else "stopped"
    assert [row["state"] for row in summary(tmp_path)] == [state, state, "waiting"]
    if signum == signal.SIGINT:
        return
    again, out, err = sweep(tmp_path, *command)
    assert again == 0, err
    assert out.count("continued at step") == 2
    rows = summary(tmp_path)
    assert [row["state"] for row in rows] == ["finished"] * 3
    alone = train(tmp_path / "alone", *command[3:], "seed=1")
    assert digest(tmp_path / rows[1]["directory"]) == digest(alone.directory)


@pytest.mark.slow
def test_a_job_array_is_the_sweep(tmp_path: Path) -> None:
    """One process per job, each of which writes the table: names, directories and folder are those
    of the whole sweep's.
    """
    command = ["-m", "seed=0,x,1", "run_name=me", *SHORT, "max_steps=4"]
    assert [sweep(tmp_path, *command, f"sweep.only={number}")[0] for number in (3, 2)] == [0, 2]
    assert [row["state"] for row in summary(tmp_path)] == ["waiting", "failed", "finished"]
    process = start(tmp_path, *command[:-1], LONG, "sweep.only=1")
    assert begun(tmp_path, 2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 138
    (run,) = [
        file.parent
        for file in tmp_path.glob("runs/puzzles/*/status.json")
        if status(file.parent)["state"] != "finished"
    ]
    assert status(run)["state"] == "requeue"
    code, out, _ = sweep(tmp_path, *command)
    assert code == 2
    assert out.count("is finished, 4 steps") == 1
    assert len(list(tmp_path.glob("runs/multirun/*"))) == 2, "that of the longer run is another"


@pytest.mark.slow
def test_a_sweep_ends_at_the_first_error_if_it_is_asked_to(tmp_path: Path) -> None:
    both = ["seed=0,0", "sweep.jobs=2"]  # one run: the second waits for the first
    code, _, err = sweep(
        tmp_path, "-m", *both, "data_path=nowhere", "sweep.on_error=stop", *SHORT, "max_steps=4"
    )
    assert code == 2
    assert err.count("data_path=nowhere") == 1
    assert "1 job was not started" in err
    assert [row["state"] for row in summary(tmp_path)] == ["failed", "waiting"]


@pytest.mark.slow
def test_jobs_of_several_ranks_are_the_same_runs(tmp_path: Path) -> None:
    """torchrun starts them, and loses their exit statuses: `status.json` has them."""
    exact = [*SHORT, "exact=true", "max_steps=4"]
    code, _, err = sweep(tmp_path, "-m", "seed=0,1", "sweep.ranks=2", *exact)
    assert code == 0, err
    rows = summary(tmp_path)
    alone = train(tmp_path / "alone", *exact, "seed=1")
    assert digest(tmp_path / rows[1]["directory"]) == digest(alone.directory)
    process = start(tmp_path, "-m", "seed=0,1", "sweep.ranks=2", *exact, LONG)
    assert begun(tmp_path, 3)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 138


@pytest.mark.slow
def test_jobs_do_not_outlive_a_sweep_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "-m", "seed=0,1", *SHORT, LONG)
    assert begun(tmp_path, 1)
    process.kill()
    (run,) = [file.parent for file in tmp_path.glob("runs/puzzles/*/metrics.jsonl")]
    assert until(lambda: status(run)["state"] == "stopped", within=20)
    assert status(run)["exit_status"] == STOPPED


@pytest.mark.slow
def test_ranks_together_leave_a_table_too(tmp_path: Path) -> None:
    command = [
        "pretrain.py",
        "-m",
        "seed=0,1",
        *SHORT,
        "max_steps=4",
        "run_name=me",
        f"hydra.sweep.dir={tmp_path}/sweep",
    ]
    paths = ["checkpoint_path=" + str(tmp_path / "run-${seed}")]
    ranks = check_ended_well(run_ranks(2, [*command, *paths]))
    assert "summary: " in ranks[0].stdout
    rows = list(csv.DictReader((tmp_path / "sweep" / "summary.csv").open()))
    assert [(row["state"], row["directory"]) for row in rows] == [
        ("finished", str(tmp_path / f"run-{seed}")) for seed in (0, 1)
    ]
    only = run_ranks(2, [*command, *paths, "sweep.only=2"])
    assert only[0].stdout.count("is finished, 4 steps") == 1


@pytest.mark.slow
def test_another_launcher_of_hydras_runs_the_same_jobs(tmp_path: Path) -> None:
    """Submitit's own processes, which find this program by the folder that they start in, or by
    PYTHONPATH.
    """
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed"
    )
    paths = [f"hydra.sweep.dir={tmp_path}/sweep", f"checkpoint_path={tmp_path}/run-${{seed}}"]
    code, _, err = sweep(
        ROOT, "-m", "hydra/launcher=submitit_local", "seed=0,1", *paths, *SHORT, "max_steps=2"
    )
    assert code == 0, err
    assert [status(tmp_path / f"run-{seed}")["state"] for seed in (0, 1)] == ["finished"] * 2
