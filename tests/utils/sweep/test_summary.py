"""The table follows from the jobs and what their directories say; the machine is shared out
evenly.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from utils.errors import ConfigError
from utils.sweep import summary
from utils.sweep.children import gpus_here, shares
from utils.sweep.entry import folder_name
from utils.sweep.jobs import Job, differing, find_fixed_keys
from utils.sweep.results import result_in
from utils.sweep.summary import table, write


def job(
    folder: Path, number: int, *overrides: str, evaluates: bool = False, error: str = ""
) -> Job:
    config = OmegaConf.create({"checkpoint_path": f"{folder}/{number}", "eval_only": evaluates})
    return Job(
        number, list(overrides), DictConfig({}), DictConfig({}), None if error else config, error
    )


def run(folder: Path, metric: str, state: str, *rows: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"objective_metric: {metric}\n")
    (folder / "status.json").write_text(
        json.dumps({"state": state, "host": "elsewhere", "heartbeat": 0})
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_table_is_what_directories_say(tmp_path: Path) -> None:
    steps = [{"step": 4, "speed/step_ms": 500}, {"step": 6, "speed/step_ms": 1000}]
    run(
        tmp_path / "1",
        "-eval/loss",
        "finished",
        *steps[:1],
        {"step": 4, "eval/loss": 1.0},
        steps[1],
        {"step": 6, "eval/loss": 2.0},
    )
    run(
        tmp_path / "2",
        "-eval/loss",
        "requeue",
        {"step": 4, "eval/loss": 0.5},
        {"step": 5, "eval/loss": None},
    )
    run(tmp_path / "3", "-eval/loss", "running")
    jobs = [job(tmp_path, number, "lr=1", f"seed={number}") for number in (1, 2, 3, 4)]
    jobs.append(job(tmp_path, 5, "lr=1", "seed=x", error="seed=x: must be a whole number"))
    rows = write(tmp_path, jobs, {})
    assert (tmp_path / "summary.csv").read_text().splitlines() == [
        "job,overrides,state,metric,value,best,steps,seconds,directory",
        f"1,seed=1,finished,eval/loss,2.0,1.0,6,4.0,{tmp_path}/1",
        f"2,seed=2,requeue,eval/loss,0.5,0.5,5,0.0,{tmp_path}/2",
        f"3,seed=3,killed,eval/loss,,,,,{tmp_path}/3",
        f"4,seed=4,waiting,,,,,,{tmp_path}/4",
        "5,seed=x,failed,,,,,,",
    ]
    assert [line.split()[0] for line in table(rows).splitlines()] == [
        "job",
        "2",
        "1",
        "3",
        "4",
        "5",
    ], "the least first"
    assert table(rows).splitlines()[0].split()[3] == "eval/loss"


def test_more_is_better_unless_the_metric_says_otherwise(tmp_path: Path) -> None:
    for number, value in ((1, 0.5), (2, 0.9)):
        run(
            tmp_path / str(number), "eval/accuracy", "finished", {"step": 1, "eval/accuracy": value}
        )
    rows = write(tmp_path, [job(tmp_path, 1, "seed=1"), job(tmp_path, 2, "seed=2")], {})
    assert [line.split()[0] for line in table(rows).splitlines()] == ["job", "2", "1"]


def test_what_another_task_knows_is_kept(tmp_path: Path) -> None:
    """One that failed before it had a directory; each task of a job array writes the whole
    table.
    """
    jobs = [job(tmp_path, 1, "seed=1"), job(tmp_path, 2, "seed=2")]
    assert [row.state for row in write(tmp_path, jobs, {1: "failed"})] == ["failed", "waiting"]
    assert [row.state for row in write(tmp_path, jobs, {2: "failed"})] == ["failed", "failed"]
    run(tmp_path / "1", "eval/accuracy", "finished")
    assert [row.state for row in write(tmp_path, jobs, {})] == ["finished", "failed"]


def test_of_evaluations_the_last_counts(tmp_path: Path) -> None:
    mine = job(tmp_path, 1, evaluates=True)
    for name, value in (("1", 0.1), ("1-2", 0.2), ("1-10", 0.3), ("1-x", 0.4)):
        run(tmp_path / name, "eval/accuracy", "finished", {"step": 1, "eval/accuracy": value})
    assert result_in(mine.directory).last == 0.3


def test_an_evaluation_that_was_begun_here_is_known_by_its_process(tmp_path: Path) -> None:
    mine = job(tmp_path, 1, evaluates=True)
    for name, pid in (("1", 1), ("1-2", 7), ("1-3", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(
            json.dumps({"state": "running", "pid": pid, "heartbeat": 100.0})
        )
    mine.begun = 200.0
    mine.locate(7)
    assert (mine.directory, mine.status_row()) == (None, {}), (
        "a former process may have had the same number"
    )
    mine.begun = 50.0
    mine.locate(7)
    assert mine.directory == tmp_path / "1-2"


def test_tasks_that_write_the_table_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, read = [job(tmp_path, number, f"seed={number}") for number in (1, 2)], summary._states

    def slowly(path: Path) -> dict[tuple[str, str], str]:
        rows = read(path)
        time.sleep(0.1)
        return rows

    monkeypatch.setattr(summary, "_states", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: write(tmp_path / "sweep", jobs, {number: "failed"}), (1, 2)))
    assert [row.state for row in write(tmp_path / "sweep", jobs, {})] == ["failed", "failed"]
    others = [job(tmp_path, 1, "lr=1"), job(tmp_path, 2, "lr=2")]
    assert [row.state for row in write(tmp_path / "sweep", others, {})] == ["waiting", "waiting"], (
        "another sweep in the same folder"
    )


def test_a_job_that_differs_from_none_shows_all_it_has(tmp_path: Path) -> None:
    assert differing([job(tmp_path, 1, "seed=0", "lr=1", "sweep.only=1")]) == ["seed=0 lr=1"]


def test_a_table_that_grows_is_read_anew(tmp_path: Path) -> None:
    run(tmp_path / "1", "eval/accuracy", "running", {"step": 1, "eval/accuracy": 0.5})
    assert result_in(tmp_path / "1").values == ((1, 0.5),)
    with open(tmp_path / "1" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "eval/accuracy": 0.25}\n{"step": 3, "eval/acc')
    assert result_in(tmp_path / "1").values == ((1, 0.5), (2, 0.25))


def test_each_job_has_its_share() -> None:
    assert shares(1, 1, {}, ["0", "1"], 8) == [{}], "one alone has all"
    assert shares(2, 1, {}, ["4", "7"], 8) == [
        {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "4"},
        {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "7"},
    ]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares(2, 2, {}, list("0123"), 8)] == [
        "0,1",
        "2,3",
    ]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares(3, 1, {}, ["0", "1"], 8)] == [
        "0",
        "1",
        "0",
    ], "more jobs than GPUs share"
    assert shares(4, 1, {}, [], 2)[3] == {"OMP_NUM_THREADS": "1"}
    assert shares(2, 1, {"OMP_NUM_THREADS": "3"}, [], 2) == [{}, {}]
    with pytest.raises(
        ConfigError, match=r"sweep\.ranks=4: there are 2 GPUs, and each rank takes one"
    ):
        shares(1, 4, {}, ["0", "1"], 8)


@pytest.mark.parametrize(
    ("given", "found"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_a_choice_of_gpus_is_respected(given: str, found: list[str]) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": given}) == found


def test_what_is_fixed_is_told_from_what_is_swept_however_it_is_written() -> None:
    line = ["lr=1e-3", "+experiment=demo", "seed=0,1", "arch.L_cycles=range(2,7)", "keep=[1,2]"]
    assert find_fixed_keys(line) == {"lr", "experiment", "keep"}
    assert not find_fixed_keys(["lr=tag(log,interval(1e-4,1e-2))", "optim=adamw,muon"])


def test_the_same_sweep_has_the_same_folder() -> None:
    name = folder_name(["experiment=demo", "seed=0,1", "lr=tag(log,interval(1e-4,1e-2))"])
    assert name.startswith("seed,lr-")
    assert (
        folder_name(
            [
                "experiment=demo",
                "seed=0,1",
                "lr=tag(log,interval(1e-4,1e-2))",
                "sweep.only=3",
                "sweep.jobs=2",
            ]
        )
        == name
    )
    assert folder_name(["experiment=demo", "seed=0,1,2", "lr=tag(log,interval(1e-4,1e-2))"]) != name
