"""Statistics over seeds, as scipy.stats has them."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from scipy import stats

from utils.report.__main__ import read
from utils.report.groups import by_setting, told_apart
from utils.sweep.seeds import Setting, difference, interval
from utils.sweep.table import write_table

A, B = [0.91, 0.93, 0.90, 0.94], [0.88, 0.92, 0.89, 0.90]


def by_seed(values: list[float], first: int = 0) -> dict[str, float]:
    return {str(seed): value for seed, value in enumerate(values, first)}


def test_the_interval_of_a_mean() -> None:
    ends = stats.t.interval(0.95, len(A) - 1, loc=stats.tmean(A), scale=stats.sem(A))
    assert interval(A) == pytest.approx((stats.tmean(A), *ends))
    assert interval(A[:1]) == (0.91, None, None)
    assert Setting("", by_seed(A), lower=True).summary()["best"] == 0.90


@pytest.mark.parametrize("first", [0, 2])
def test_a_difference_is_paired_over_equal_seeds(first: int) -> None:
    said = difference(Setting("a", by_seed(A)), Setting("b", by_seed(B, first)), "x")
    test = stats.ttest_ind(A, B, equal_var=False) if first else stats.ttest_rel(A, B)
    ends = test.confidence_interval()
    shown = f"(95 % interval {ends.low:+.3g} to {ends.high:+.3g}, p = {test.pvalue:.2g};"
    assert shown in said
    assert ("paired" in said) == (first == 0)
    assert re.match("a and b differ: x is" if test.pvalue < 0.05 else "No difference is", said)
    assert difference(Setting("a", by_seed(A)), Setting("b", by_seed(B[:1])), "x") == ""


@pytest.mark.parametrize(
    ("one", "other", "first", "values"),
    [
        (A, A, 0, "0.92 and 0.92, +0"),
        ([1.0] * 3, [0.5] * 3, 0, "1 and 0.5, +0.5"),
        ([1.0] * 3, [0.5] * 3, 3, "1 and 0.5, +0.5"),
        ([0.0] * 3, [0.0] * 3, 0, "0 and 0, +0"),
        ([0.9, 0.7, 0.4], [0.8, 0.6, 0.3], 0, "0.6667 and 0.5667, +0.1"),  # equal but for rounding
    ],
)
def test_equal_differences_are_not_tested(
    one: list[float], other: list[float], first: int, values: str
) -> None:
    said = difference(Setting("a", by_seed(one)), Setting("b", by_seed(other, first)), "x")
    assert said == f"No test of a and b is possible: x is {values} with no spread over the seeds."


def seeds_folder(folder: Path) -> Path:
    """A sweep over a rate and a seed, one of whose jobs has failed."""
    jobs = []
    cells = [(lr, seed) for lr in ("1e-3", "1e-2") for seed in range(3)]
    for number, (lr, seed) in enumerate(cells, 1):
        run = folder / f"run{number}"
        run.mkdir(parents=True)
        config = {"objective_metric": "-eval/loss", "lr": float(lr), "seed": seed, "run_name": run}
        (run / "config.yaml").write_text(json.dumps(config, default=str))
        (run / "status.json").write_text(json.dumps({"state": "finished"}))
        losses = [] if number == 6 else [number + 1 / step for step in (10, 20, 30)]
        rows = [
            {"step": 10 * i, "time": float(i), "eval/loss": loss} for i, loss in enumerate(losses)
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        about = {"lr": lr, "seed": str(seed)}
        jobs.append({"number": number, "overrides": about, "directory": str(run)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return folder


def test_jobs_that_differ_in_their_seed_are_one_row(tmp_path: Path) -> None:
    said = write_table(seeds_folder(tmp_path))
    first, second = csv.DictReader((tmp_path / "summary.csv").open())
    assert (first["overrides"], first["n"], first["jobs"]) == ("lr=1e-3", "3", "1 2 3")
    low, high = stats.t.interval(0.95, 2, loc=2 + 1 / 30, scale=3**-0.5)
    numbers = [float(first[name]) for name in ("mean", "low", "high", "best", "worst")]
    assert numbers == pytest.approx([2 + 1 / 30, low, high, 1 + 1 / 30, 3 + 1 / 30])
    assert (second["overrides"], second["n"], second["jobs"]) == ("lr=1e-2", "2", "4 5 6")
    assert [row["job"] for row in csv.DictReader((tmp_path / "jobs.csv").open())] == [*"123456"]
    assert "lr=1e-3 and lr=1e-2" in said.splitlines()[-1]


def other_metric(run: Path) -> None:
    """Judges a run of the sweep by its accuracy, which is better the higher the loss is."""
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("-eval/loss", "eval/accuracy"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"eval/accuracy": row["eval/loss"] / 10} for row in rows]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_settings_are_compared_by_one_metric(tmp_path: Path) -> None:
    seeds_folder(tmp_path)
    before = write_table(tmp_path)
    for number in (4, 5, 6):
        other_metric(tmp_path / f"run{number}")
    assert write_table(tmp_path) == before
    groups = by_setting([tmp_path / f"run{number}" for number in range(1, 7)])
    said = "No comparison: the settings' metrics differ, eval/loss and eval/accuracy."
    assert told_apart(groups) == said
    assert told_apart([(name, runs[:1]) for name, runs in groups]) == ""


def test_a_seed_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    seeds_folder(tmp_path)
    runs = [tmp_path / f"run{number}" for number in (1, 2, 4, 5)]
    again = Path(shutil.copytree(runs[1], tmp_path / "again"))
    page = read([*runs, again])
    assert [run["seeds"] for run in page["runs"]] == [2, 2]
    assert page["difference"] == read(runs)["difference"]
    assert len(read([runs[0], runs[2], runs[2]])["runs"]) == 3, "no setting has several seeds"


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_stopped_does_not_count_beside_finished_ones(
    finished: bool, tmp_path: Path
) -> None:
    seeds_folder(tmp_path)
    for number in range(1, 7):
        state = "finished" if finished and number != 3 else "stopped"
        (tmp_path / f"run{number}" / "status.json").write_text(json.dumps({"state": state}))
    counts, low, high = ([2, 2], 1, 2) if finished else ([3, 2], 1, 3)
    write_table(tmp_path)
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [int(row["n"]) for row in rows] == counts
    groups = by_setting([tmp_path / f"run{number}" for number in range(1, 6)])
    of_sweep, of_runs = read([tmp_path]), read([run for _, runs in groups for run in runs])
    for page in (of_sweep, of_runs):
        assert [run["seeds"] for run in page["runs"]] == counts
        curve = page["runs"][0]["eval"]["curves"]["eval/loss"]
        assert (curve["min"][0], curve["max"][0]) == (low + 0.1, high + 0.1)
        assert page["runs"][0]["status"]["state"] == "stopped"
        assert f"eval/loss is {(low + high) / 2 + 1 / 30:.4g} and 4.533" in page["difference"]
