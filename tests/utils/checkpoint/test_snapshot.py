"""A checkpoint that does not fit the job is refused before anything of it is taken; and what is said of one that does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn

from optim.adam_atan2 import AdamATan2
from optim.builtin import adadelta, adamw, muon, sgd
from optim.ema import EMA
from optim.schedule import WarmupCosine, set_lr
from tests.utils.checkpoint.writer_rank import declare
from utils.checkpoint import snapshot
from utils.checkpoint.carries import Slots
from utils.checkpoint.writer import Saver
from utils.errors import ConfigError
from utils.measure.metrics import Meter
from utils.ranks.distributed import Dist
from utils.rundir.directory import Run

CARRY = {"z": torch.zeros(4, 3), "steps": torch.zeros(4, dtype=torch.int32)}
Tensors = dict[str, torch.Tensor]


def made(optimizer: Callable[..., Any] = AdamATan2, total_steps: int = 100, say: Callable[[str], object] = print) -> Any:
    """A job of two shards, as far as a checkpoint is concerned."""
    net = nn.Linear(3, 2, bias=False)
    dense = optimizer([("weight", net.weight)], lr=0.5)
    dense.param_groups[0]["base_lr"] = 0.5
    job = SimpleNamespace(
        objective=net, dense=[dense], ema=EMA({"weight": net.weight}, {}, 0.9), parts=[range(2)], slots=Slots([range(2)], lambda: CARRY),
        meter=Meter(2), dist=Dist(), schedule=WarmupCosine(total_steps, 0, 0.1), cfg=OmegaConf.create({"shards": 2}), step=0,
        source=SimpleNamespace(spec=SimpleNamespace(fingerprint="x")), run=SimpleNamespace(wandb_id=None, say=say),
        evaluation_due=False, results={}, best=None, best_of="", resumed_from="",
    )  # fmt: skip
    return job


def trained(directory: Path, job: Any, steps: int = 3) -> Path:
    """A checkpoint of the job after some steps."""
    for _ in range(steps):
        job.objective.weight.grad = torch.randn(2, 3)
        job.dense[0].step()
        job.ema.update()
        job.slots.put([{name: torch.cat([tensor + 1, tensor + 2]) for name, tensor in CARRY.items()}])
        job.meter.add({"loss": (torch.tensor(1.0), torch.tensor(2.0))})
        job.step += 1
    saver = Saver(directory, Dist(), pytest.fail)
    saver.save(job.step, *snapshot.snapshot(job))
    assert saver.wait() == ""
    return directory / f"step_{job.step}"


def restored(folder: Path, job: Any) -> Any:
    snapshot.restore(job, folder, json.loads((folder / "meta.json").read_text()))
    return job


@pytest.mark.parametrize("optimizer", [AdamATan2, adadelta, adamw, muon, sgd])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_fits_is_taken(optimizer: Callable[..., Any], steps: int, tmp_path: Path) -> None:
    job = made(optimizer)
    folder = trained(tmp_path, job, steps)
    again = restored(folder, made(optimizer))
    for one, two in zip(snapshot.snapshot(job)[0].values(), snapshot.snapshot(again)[0].values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert again.step == steps
    assert snapshot.snapshot(again)[2] == snapshot.snapshot(job)[2]
    again.objective.weight.grad = torch.ones(2, 3)
    again.dense[0].step()


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


MEAN, LOSS, Z = "0/weight/exp_avg", "meter/loss", "carry/z"
UNFIT: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("model", drop("weight"), "model: weight is missing from it"),
    ("model", put("weight", torch.ones(3, 2)), "model: weight has shape (3, 2) there and (2, 3) here"),
    ("model", put("weight", torch.ones(2, 3).double()), "model: weight is of torch.float64 there and of torch.float32 here"),
    ("model", put("more", torch.ones(1)), "model: it holds more"),
    ("optimizer", drop(MEAN), f"optimizer: {MEAN} is missing from it"),
    ("optimizer", Tensors.clear, "optimizer: 0/group0/step is missing from it"),
    ("optimizer", drop("0/group0/step"), "optimizer: 0/group0/step is missing from it"),
    ("optimizer", lambda t: [t.pop(name) for name in list(t) if "exp" in name], "is missing from it"),
    ("optimizer", put(MEAN, torch.ones(3)), f"optimizer: {MEAN} has shape (3,)"),
    ("optimizer", put(MEAN, torch.ones(2, 3).int()), f"optimizer: {MEAN} is of torch.int32"),
    ("optimizer", put("0/group0/step", torch.tensor(1.5)), "optimizer: 0/group0/step is of torch.float32"),
    ("optimizer", put("1/weight/exp_avg", torch.ones(2, 3)), "optimizer: it holds 1/weight/exp_avg"),
    ("ema", drop("steps"), "ema: steps is missing from it"),
    ("ema", put("dense/weight", torch.ones(3)), "ema: dense/weight has shape (3,)"),
    ("ema", put("dense/weight", torch.ones(2, 3).half()), "ema: dense/weight is of torch.float16"),
    ("shards", put(Z, torch.ones(4, 4)), "z has shape (4, 4) in the saved state and (4, 3) here"),
    ("shards", put(Z, torch.ones(4, 3).int()), "z is of torch.int32 in the saved state"),
    ("shards", drop(Z), "z is missing from the saved state"),
    ("shards", put("carry/more", torch.ones(1)), "more is only in the saved state"),
    ("shards", put("more", torch.ones(1)), "shard 0: it holds more"),
    ("shards", put(LOSS, torch.ones(3)), f"shard 0: {LOSS} has shape (3,)"),
    ("shards", put(LOSS, torch.ones(2)), f"shard 0: {LOSS} is of torch.float32"),
]


@pytest.mark.parametrize(("group", "change", "problem"), UNFIT)
def test_what_does_not_fit_leaves_the_job_as_it_was(group: str, change: Callable[[Tensors], object], problem: str, tmp_path: Path) -> None:
    folder, job = trained(tmp_path, made()), made()
    file = folder / ("shards.0-1.safetensors" if group == "shards" else f"{group}.safetensors")
    tensors = load_file(file)
    if group == "shards":
        each = {shard: {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{shard}/")} for shard in (0, 1)}
        for members in each.values():
            change(members)
        tensors = {f"{shard}/{name}": tensor.clone() for shard, members in each.items() for name, tensor in members.items()}
    else:
        change(tensors)
    save_file(tensors, file)
    declare(folder)
    before = job.objective.weight.clone()
    with pytest.raises(ConfigError) as caught:
        restored(folder, job)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(job.objective.weight, before)
    assert (job.step, job.ema.steps, job.meter.state(0), job.slots.state()[0]) == (0, 0, {}, {})
    if group in ("model", "ema") and "float64" not in problem:
        with pytest.raises(ConfigError, match=r"^checkpoint="):
            snapshot.load_weights(job, folder)


def test_a_longer_run_says_how_the_learning_rate_jumps(tmp_path: Path) -> None:
    folder = trained(tmp_path, made(total_steps=10))
    for total, expected in (
        (10, []),
        (20, ["the learning rate jumps at step 3 from 0.407252 to 0.475476, because the run has another length now"]),
    ):
        said: list[str] = []
        restored(folder, made(total_steps=total, say=said.append))
        assert said == expected
    meta = json.loads((folder / "meta.json").read_text())
    del meta["lr"]
    (folder / "meta.json").write_text(json.dumps(meta))
    declare(folder)
    restored(folder, made(total_steps=20, say=said.append))
    assert len(said) == 1, "an older checkpoint knows no rate"


def test_the_rate_that_is_saved_is_the_one_trained_with(tmp_path: Path) -> None:
    job = made()
    folder = trained(tmp_path, job, steps=7)
    set_lr(job.dense, job.schedule(7))
    assert json.loads((folder / "meta.json").read_text())["lr"] == job.dense[0].param_groups[0]["lr"]


def test_what_is_said_before_the_log_is_open_is_in_it(tmp_path: Path) -> None:
    """As what a checkpoint is found to be: known before the run directory is touched."""
    run = Run(tmp_path / "run", Dist())
    run.say("the learning rate jumps")
    assert not (tmp_path / "run").exists()
    run.begin("x: 1\n", {"mode": "disabled"})
    run.say("later")
    run.close()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (log.count("jumps"), log.count("later")) == (1, 1)
    assert log.index("jumps") < log.index("later")
