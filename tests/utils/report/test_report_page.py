"""The report page: what it reads from any run directory, and that it works in a real browser."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.browser import opened
from tests.runs import TINY_TRM, train
from tests.utils.checkpoint.helpers import META, held
from tests.utils.sweep.test_seeds import seeds_folder
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.report.__main__ import draw, main, read
from utils.report.charts import curves
from utils.rundir.folders import MARK
from utils.rundir.records import read_metrics

EVIL = '</script ><img src=x onerror="hacked=1"><b>\u2028\'"&amp;<!-- {{}} ]]>'
CONFIG = f"""{MARK}run_name: mine
project_name: tests
objective_metric: eval/exact_accuracy
global_batch_size: 32
expected: {{metric: eval/exact_accuracy, at: {{40: [0.4, 0.6]}}}}
arch: {{_target_: models.recursive.trm.TRM, lr: null}}
"""
NOW = 1_700_000_000.0


def trained(step: int, **more: float) -> dict[str, Any]:
    speed = {"speed/step_ms": 100.0, "speed/data_wait_ms": 10.0, "speed/examples_per_s": 320.0}
    loss = {"train/loss": 10 / step, "train/exact_accuracy": min(1.0, step / 100)}
    return {"step": step, "time": NOW + step / 10, **loss, **speed, **more}


def evaluated(step: int, value: float) -> dict[str, Any]:
    bounds = {"_low": value - 0.1, "_high": value + 0.1, "_n": 500.0}
    values = {f"eval/exact_accuracy{end}": each for end, each in bounds.items()}
    return {"step": step, "time": NOW + step / 10, "eval/exact_accuracy": value, **values}


def event(name: str, step: int, at: float, **facts: Any) -> dict[str, Any]:
    return {"time": NOW + at, "event": name, "step": step, **facts}


def started(step: int, at: float, ranks: int) -> dict[str, Any]:
    facts = {"hosts": ["a"], "device": "CPU", "threads": 1, "cores": 2, "torch": "2.13.0"}
    plan = {"total_steps": 80, "examples_per_step": 32, "tokens_per_example": 36}
    told = {"resumed": step > 0, "ranks": ranks, "launcher": "torchrun", "arguments": ["lr=1"]}
    return event("started", step, at, **told, **facts, **plan)


def written(folder: Path, rows: list[dict], events: list[dict], state: str = "finished") -> Path:
    """A run directory as a run would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": state, "reason": "because" if state == "failed" else "", "step": 80}
    (folder / "status.json").write_text(json.dumps(status | {"heartbeat": time.time()}))
    (folder / "log.txt").write_text("2026-01-01 00:00:00  hello\n")
    return folder


def resumed_run(folder: Path, state: str = "finished") -> Path:
    """Two ranks, stopped after 40 steps; an hour later one rank goes on."""
    rows = [trained(step) for step in range(10, 50, 10)] + [evaluated(40, 0.5)]
    later = [trained(step) for step in range(50, 90, 10)] + [evaluated(80, 0.75)]
    for row in later:
        row["time"] += 3600
    events = [
        started(0, 0, 2),
        event("skipped", 20, 2, reason="not finite"),
        event("evaluated", 40, 4.5, seconds=0.5),
        event("checkpoint", 40, 4.6, bytes=1000, digest="a" * 64),
        event("ended", 40, 5, state="stopped", reason="SIGTERM"),
        started(40, 3605, 1),
        event("checkpoint", 80, 3609, bytes=1000, digest="b" * 64),
    ]
    return written(folder, rows + later, events, state)


def checkpoint(run: Path, step: int, **tensors: torch.Tensor) -> None:
    writer = Writer(run / "checkpoints", Dist(), pytest.fail)
    writer.save(step, held({"model": tensors}), META)
    assert writer.wait() == ""
    writer.close()


def shown(run: Path) -> dict[str, Any]:
    """What the page shows of one run."""
    (payload,) = read([run])["runs"]
    return payload


def test_a_run_that_was_resumed_with_other_ranks(tmp_path: Path) -> None:
    checkpoint(resumed_run(tmp_path / "run"), 80)
    run = shown(tmp_path / "run")
    assert [(each["kind"], each["step"]) for each in run["timeline"]] == [
        ("started", 0), ("skipped", 20), ("checkpoint", 40), ("signal", 40), ("ranks", 40),
        ("checkpoint", 80),
    ]  # fmt: skip
    assert (
        run["timeline"][-2]["text"] == "restarted on 1 rank (a, CPU, PyTorch 2.13.0), before on 2"
    )
    assert run["seconds"] == pytest.approx(9.0), "the hour in between does not count"
    assert run["headline"] | {"low": 0, "high": 0} == {
        "name": "eval/exact_accuracy", "unit": "%", "lower": False, "last": 0.75, "step": 80,
        "best": 0.75, "best_step": 80, "low": 0, "high": 0, "n": 500.0,
    }  # fmt: skip
    assert run["spent"] == {
        "data_wait": 0.8, "all_reduce": 0.0, "checkpoint": 0.0, "compute": 7.2, "evaluation": 0.5,
    }  # fmt: skip
    assert run["expected"]["verdict"] == "on track"
    assert [(each["step"], each["gone"]) for each in run["digests"]] == [(40, True), (80, False)]
    assert run["command"] == "torchrun --nproc-per-node 1 pretrain.py lr=1"


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("eval/exact_accuracy", 0.39, "behind"),
        ("eval/exact_accuracy", 0.9, "on track"),
        ("-eval/loss", 0.7, "behind"),
    ],
)
def test_a_run_is_on_track_or_not(metric: str, value: float, verdict: str, tmp_path: Path) -> None:
    name = metric.removeprefix("-")
    folder = written(tmp_path, [{"step": 40, "time": NOW, name: value}], [])
    text = CONFIG.replace("eval/exact_accuracy", metric, 1).replace("eval/exact_accuracy", name)
    (folder / "config.yaml").write_text(text)
    assert shown(folder)["expected"]["verdict"] == verdict


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"step": 1, "train/loss": 1.0}\n{"step": 2, "train/l',
        b'[1]\n{"step": "x"}\n{"step": 3, "time": null, "train/loss": NaN, "eval/x": "no"}\nnull\n',
        b"a: &a [*a]",
        b'{"step": 1, "event": "started", "time": 1, "hosts": [' + b"[" * 700 + b"]" * 700 + b"]}",
        b'{"step": %d, "train/loss": 1}\n{"step": 1, "train/loss": %d}' % (10**30, 10**400),
        b"{expected: {at: 3}}",
    ],
)
def test_damaged_files_make_a_page_all_the_same(content: bytes, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert draw([tmp_path], str(page)).startswith("report: "), "nothing is there at all"
    names = ("config.yaml", "metrics.jsonl", "status.json", "events.jsonl", "log.txt", "git.txt")
    for name in names:
        (tmp_path / name).write_bytes(content)
    scenes = tmp_path / "evaluations" / "step_3" / "all"
    scenes.mkdir(parents=True)
    (scenes / "x.scene.json").write_bytes(content)
    draw([tmp_path], str(page))
    assert "payload" in page.read_text()


def test_a_page_stands_in_runs_and_sweeps_alone(tmp_path: Path) -> None:
    for name in ("report.html", "config.yaml", "status.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="no run has begun there"):
        draw([tmp_path], None)
    with pytest.raises(ConfigError, match="no run has begun there"):
        draw([tmp_path, resumed_run(tmp_path / "run")], None)
    assert (tmp_path / "report.html").read_text() == "{}"
    assert not (tmp_path / "comparison.html").exists()


def test_curves_keep_extremes(tmp_path: Path) -> None:
    rows = [{"step": step, "time": NOW, "a": 100.0 if step == 777 else 1.0} for step in range(5000)]
    rows[1234]["a"] = None
    curve = curves(read_metrics(written(tmp_path, rows, []))["train"], 50)
    assert len(curve["step"]) == 50
    assert max(curve["curves"]["a"]["max"]) == 100.0
    assert curve["curves"]["a"]["mean"][0] == 1


def test_metrics_that_belong_together_share_a_chart(tmp_path: Path) -> None:
    part = {f"eval/{name}": 0.5 for name in ("val/l0/a", "l0/a", "recall_2", "recall_10")}
    rows = [{"step": 1, **part, "eval/recall_0": 1, "eval/b/live": 2, "eval/loss_1": 0.1},
            {"step": 1, "train/l0": 3, "train/lr": 1, "train/grad_norm": 1}]  # fmt: skip
    (tmp_path / "evaluations" / "step_1" / "b").mkdir(parents=True)
    charts = read([written(tmp_path, rows, [])])["charts"]["curves"]
    titles = {chart["title"]: [line["label"] for line in chart["lines"]] for chart in charts}
    # `val` has evaluated what all sets have: once is enough
    assert titles == {
        "loss_1": [""], "l0": ["", "a"], "live": ["b"], "recall": ["0", "2", "10"],
        "lr": [""], "grad_norm": [""],
    }  # fmt: skip


@pytest.mark.slow
def test_a_page_keeps_within_its_size(tmp_path: Path) -> None:
    """However much a run has left of everything; and of sixteen runs."""
    many = {f"train/{'m' * 30}{i}": 0.123456 * i for i in range(40)}
    rows = [trained(step, **many) for step in range(1, 3000)]
    events = [started(0, 0, 1)]
    events += [event("checkpoint", step, step, bytes=1, digest="a" * 64) for step in range(2000)]
    events += [event("skipped", step, step, reason="not finite") for step in range(200)]
    run = written(tmp_path / "run", rows, events)
    (run / "log.txt").write_text(f"{'x' * 1000}\n" * 1000)
    for step in range(9):
        folder = run / "evaluations" / f"step_{step}" / "all"
        folder.mkdir(parents=True)
        scene = {"kind": "text", "items": [{"prompt": "<" * 9_000, "continuation": "é" * 900}]}
        (folder / "x.scene.json").write_text(json.dumps(scene))
        (folder / "y.svg").write_bytes(b"x" * 70_000)
    draw([run], None)
    assert shown(run)["timeline"][0]["kind"] == "started", "checkpoints do not push it out"
    assert 400_000 < os.path.getsize(run / "report.html") < 600_000
    draw([run] * 16, str(tmp_path / "all.html"))
    assert os.path.getsize(tmp_path / "all.html") < 600_000


def test_where_two_runs_first_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, third = (resumed_run(tmp_path / name) for name in ("one", "other", "third"))
    for run, last in ((one, 1.0), (other, 1.0), (third, 1.5)):
        checkpoint(run, 40, a=torch.ones(3), b=torch.tensor([1, last], dtype=torch.bfloat16))
    rows = (third / "metrics.jsonl").read_text()
    rows = rows.replace('"train/loss": 0.2,', '"train/loss": 0.25,')
    (third / "metrics.jsonl").write_text(rows)
    assert main([str(one), str(other)]) == 0
    # of step 80 the digests are left
    same = "The same to the bit: 8 logged steps and 2 checkpoints compared."
    assert capsys.readouterr().out.startswith(f"{same}\n")
    assert main([str(one), str(other), str(third)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mine ({other}): {same}"
    assert lines[1] == (
        f"mine ({third}): First difference: step 40: tensor model/b of the checkpoint, 1 of 2"
        " tensors differ; step 50: metric train/loss (0.2 and 0.25)."
    )
    assert read([one, third])["runs"][1]["comparison"]["tensors"] == [
        {"name": "model/b", "shape": [2], "largest": 0.5, "count": 1, "of": 2}
    ]
    empty = written(tmp_path / "empty", [], [])
    assert draw([one, empty], None).startswith("Nothing to compare: no step in common.\n")


@pytest.mark.parametrize("here", ["null", "NaN", "1.0"])
@pytest.mark.parametrize("there", ["null", "NaN", "1.0"])
def test_a_metric_that_is_not_finite_in_one_run_alone(
    here: str, there: str, tmp_path: Path
) -> None:
    one, other = (written(tmp_path / name, [], []) for name in ("one", "other"))
    for run, loss in ((one, here), (other, there)):
        (run / "metrics.jsonl").write_text(f'{{"step": 5, "time": 1, "train/loss": {loss}}}\n')
    differ = (here == "1.0") != (there == "1.0")
    said = f"step 5: metric train/loss ({here} and {there})".replace("NaN", "null")
    start = f"First difference: {said}." if differ else "The same metrics;"
    assert draw([one, other], None).startswith(start)


def sweep_folder(folder: Path) -> Path:
    jobs = []
    for number, (lr, value) in enumerate([("1e-4", 0.5), ("1e-3", 0.9), ("1e-2", None)], start=1):
        run = folder / f"run{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("objective_metric: eval/x\n")
        (run / "status.json").write_text(json.dumps({"state": "finished" if value else "failed"}))
        rows = [{"step": 9, "time": 1.0, "eval/x": value}] if value else []
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        about = {"lr": lr, "optim.x": f"{EVIL[:12]} {number}", "y": "[1,2]"}
        jobs.append({"number": number, "overrides": about, "directory": str(run)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return folder


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ("{}", "Input should be a valid array"),
        ("[{}]", "0.number: Field required"),
        (
            '[{"number": 1, "overrides": {"a": []}, "directory": ""}]',
            "0.overrides.a=[]: Input should be a valid string",
        ),
    ],
)
def test_damaged_jobs_are_one_line(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(content)
    with pytest.raises(ConfigError, match="the sweep that wrote it") as error:
        draw([tmp_path], None)
    assert str(error.value).startswith(f"{tmp_path}/jobs.json: {problem}; ")


def test_a_sweep(tmp_path: Path) -> None:
    sweep = read([sweep_folder(tmp_path / "sweep")])["sweep"]
    assert sweep["keys"] == ["lr", "optim.x"]
    assert [(job["value"], job["state"], job["keys"]["lr"]) for job in sweep["jobs"]] == [
        (0.9, "finished", "1e-3"), (0.5, "finished", "1e-4"), (None, "failed", "1e-2"),
    ]  # fmt: skip


# ---- in a browser


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_page_works(state: str, browser: Any, tmp_path: Path) -> None:
    checkpoint(resumed_run(tmp_path / "run", state), 80)
    draw([tmp_path / "run"], None)
    with opened(browser, dark=state == "failed") as window:
        page = window.open(tmp_path / "run" / "report.html")
        assert page.locator("header .state").inner_text() == state
        assert page.locator(".reason").count() == (state == "failed")
        assert page.locator(".number.first .value").inner_text().replace("\xa0", " ") == "75 %"
        assert "On track" in page.locator(".verdict").inner_text()
        checkpoints = page.locator("#same tbody tr td:last-child").all_inner_texts()
        assert checkpoints == ["kept", "deleted"]
        scheme = "document.documentElement.style.colorScheme"
        before = page.evaluate(scheme)
        assert before == ("dark" if state == "failed" else "light")
        page.locator("button.theme").click()
        assert page.evaluate(scheme) != before
        assert window.problems == []


def test_curves_answer(browser: Any, tmp_path: Path) -> None:
    draw([resumed_run(tmp_path / "run")], None)
    with opened(browser) as window:
        page = window.open(tmp_path / "run" / "report.html")
        assert page.locator("#curves input[type=range]").count() == 0, "nothing to smooth"
        plot = page.locator("#curves .chart svg").first
        tip = page.locator("#curves .tip").first
        assert tip.is_hidden()
        box = plot.bounding_box()
        plot.hover(position={"x": box["width"] - 20, "y": 60})
        assert "step 80" in tip.inner_text()
        assert "75" in tip.inner_text()
        page.get_by_role("button", name="Wall clock").click()
        plot.hover(position={"x": box["width"] - 20, "y": 60})
        assert tip.locator("b").inner_text() == "time in s 8"
        page.get_by_role("button", name="Examples").click()
        plot.focus()
        page.keyboard.press("End")
        assert "examples 2,560" in tip.inner_text()
        curve = page.locator("#curves .curve").first
        before = curve.get_attribute("d")
        page.get_by_role("button", name="Log").click()
        assert curve.get_attribute("d") != before
        assert page.locator("#curves .expected").count() == 1
        drawn = page.locator("#curves .curve").count()
        page.get_by_role("button", name="held out").first.click()
        assert page.locator("#curves .curve").count() == drawn - 1
        page.reload()
        page.wait_for_selector("footer")
        assert (
            page.get_by_role("button", name="held out").first.get_attribute("aria-pressed")
            == "false"
        )
        assert window.problems == []


@pytest.mark.parametrize("state", ["running", "finished"])
def test_the_page_of_a_run_that_goes_on_reloads(state: str, browser: Any, tmp_path: Path) -> None:
    draw([resumed_run(tmp_path / "run", state)], None)
    with opened(browser) as window:
        window.page.clock.install()
        page = window.open(tmp_path / "run" / "report.html")
        page.evaluate("before = true")
        page.clock.run_for(15_000)
        page.mouse.move(9, 9)  # somebody reads
        page.clock.run_for(15_000)
        assert page.evaluate("typeof before") == "boolean"
        page.clock.run_for(10_000)
        page.wait_for_selector("footer")
        reloaded = page.evaluate("typeof before") == "undefined"
        assert reloaded == (state == "running")


def evil_run(folder: Path) -> Path:
    """Texts of a user, a file name and a failure, all of them hostile."""
    run = resumed_run(folder, "failed")
    config = {
        "run_name": EVIL,
        "project_name": EVIL,
        "objective_metric": f"eval/{EVIL}",
        EVIL: EVIL,
    }
    (run / "config.yaml").write_text(MARK + json.dumps(config))
    (run / "status.json").write_text(json.dumps({"state": EVIL, "reason": EVIL}))
    rows = [{"step": 1, "time": NOW, f"train/{EVIL}": 1.0}, {"step": 1, f"eval/{EVIL}": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [started(0, 0, 2) | {"hosts": [EVIL], "data": EVIL, "fingerprint": EVIL}]
    events += [event("skipped", 1, 1, reason=EVIL), event("checkpoint", 1, 2, digest=EVIL)]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (run / "log.txt").write_text(EVIL)
    (run / "git.txt").write_text(f"revision: {EVIL}\nbranch: {EVIL}\n")
    folder = run / "evaluations" / "step_1" / "all"
    folder.mkdir(parents=True)
    scene = {"kind": EVIL, "title": EVIL}
    (folder / "x.scene.json").write_text(json.dumps(scene))
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><script>hacked=1</script><image href="http://127.0.0.1:9/x"/></svg>{EVIL}'
    (folder / f"{EVIL.replace('/', '')}.svg").write_text(svg)
    return run


def test_hostile_texts_stay_texts(browser: Any, tmp_path: Path) -> None:
    run = evil_run(tmp_path / "run")
    draw([run], None)
    draw([run, resumed_run(tmp_path / "other")], str(tmp_path / "both.html"))
    draw([sweep_folder(tmp_path / "sweep")], None)
    pages = (run / "report.html", tmp_path / "both.html", tmp_path / "sweep" / "report.html")
    for path in pages:
        with opened(browser) as window:
            page = window.open(path)
            page.wait_for_timeout(200)
            assert page.evaluate("typeof hacked") == "undefined"
            assert page.locator("img[src=x], main b img").count() == 0
            assert window.problems == []


@pytest.mark.slow
def test_little_is_a_page_too_and_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    draw([tmp_path / "empty"], str(tmp_path / "empty" / "report.html"))
    draw([resumed_run(tmp_path / "run")], None)
    draw([resumed_run(tmp_path / "two"), tmp_path / "run"], str(tmp_path / "two" / "report.html"))
    draw([sweep_folder(tmp_path / "sweep")], None)
    for name in ("empty", "run", "two", "sweep"):
        with opened(browser, width=390) as window:
            window.open(tmp_path / name / "report.html")
            window.check(390)


def test_a_sweep_can_be_sorted(browser: Any, tmp_path: Path) -> None:
    draw([sweep_folder(tmp_path / "sweep")], None)
    with opened(browser) as window:
        page = window.open(tmp_path / "sweep" / "report.html")
        first = page.locator("#jobs tbody tr td").first
        assert first.inner_text() == "2", "the best first"
        page.get_by_role("button", name="lr", exact=True).click()
        assert first.inner_text() == "1"
        page.get_by_role("button", name="lr", exact=True).click()
        assert first.inner_text() == "3"
        assert page.locator("#keys svg").count() == 2
        assert window.problems == []


def test_seeds_are_a_band_around_their_mean(browser: Any, tmp_path: Path) -> None:
    sweep = seeds_folder(tmp_path / "sweep")
    said = draw([sweep], None)
    assert said == f"{said.splitlines()[0]}\nreport: {sweep / 'report.html'}"
    assert draw([*sweep.glob("run?")], str(tmp_path / "page.html")).startswith(
        "lr=0.01 and lr=0.001 "
    )
    one = read([sweep])["runs"][0]
    assert one["eval"]["curves"]["eval/loss"] == {
        "mean": [2.1, 2.05, 2.0333], "min": [1.1, 1.05, 1.0333], "max": [3.1, 3.05, 3.0333]
    }  # fmt: skip
    with opened(browser) as window:
        page = window.open(sweep / "report.html")
        row = page.locator("#settings tbody tr").first.inner_text().split()
        assert row[:6] == ["1e-3", "2.033", "-0.4508", "4.517", "1.033", "3.033"]
        assert page.locator("#curves path.spread").count() == 2
        window.check(1280)
        assert window.open(tmp_path / "page.html").locator("path.spread").count() == 2
        window.check(1280)


@pytest.mark.slow
def test_two_ranks_then_one(browser: Any, tmp_path: Path) -> None:
    same = [*TINY_TRM, "exact=true", "arch.forward_dtype=float32", "run_name=x", "report=true"]
    train(tmp_path / "run", *same, "max_steps=4", ranks=2)
    run = train(tmp_path / "run", *same, "max_steps=8")
    alone = train(tmp_path / "alone", *same, "max_steps=8")
    assert run.stdout.splitlines()[-1] == f"report: {run.directory / 'report.html'}"
    with opened(browser) as window:
        page = window.open(run.directory / "report.html")
        marks = page.locator(".legend.marks span").all_inner_texts()
        assert marks == ["checkpoint", "other number of ranks"]
        assert "2 starts" in page.locator("header").inner_text()
        assert page.locator("#same tbody tr").count() >= 2
        assert window.problems == []
    text = draw([run.directory, alone.directory], None)
    assert text.startswith("The same to the bit: 8 logged steps and 1 checkpoint compared.\n")
