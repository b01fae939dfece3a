"""`plan`: memory counted without computing is the memory of a real pass, and what is chosen is the
run that anybody gets.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain
from data.source import RunSettings
from optim.groups import build_dense
from optim.optimizer_state import OptimizerState
from tests.ranks import check_ended_well, run_ranks
from tests.runs import QUIET, TINY_CNN, TINY_GPT, TINY_PREFIX, TINY_SUDOKU, TINY_TRM, config_of
from tests.steps import steps_of, trainer_on
from utils.command.instantiate import make
from utils.measure import capacity
from utils.ranks.distributed import Dist

ALONE = Dist()
FLOAT32 = "arch.forward_dtype=float32"
TOYS = ["global_batch_size=64", "max_steps=3", "data.held_out=64"]
# every arch and every kind of data; what is in capitals, a fixture makes
RUNS = {
    "trm": TINY_TRM,
    "hrm": [each for each in TINY_TRM if "_len" not in each and "ACT" not in each] + ["arch=hrm"],
    "sudoku": TINY_SUDOKU,
    "digits": TINY_CNN,
    "tokens": TINY_GPT,
    "recompute": [*TINY_GPT, "arch.recompute=true"],
    "stream": [each for each in TINY_GPT if "embedded" not in each]
    + ["data=stream", "data_path=TEXTS"],
    "tms": ["experiment=tms_target", *TOYS],
    "resid_mlp": [
        "experiment=resid_mlp_target",
        "arch.hidden_size=32",
        "data.num_features=9",
        *TOYS,
    ],
    # what is computed once for all examples without a feature, nobody can count beforehand
    "components": ["experiment=tms_5_2", "arch.target=TARGET", "data.probability=1", *TOYS],
    "prefix": [*TINY_PREFIX, "arch.target=LANGUAGE_MODEL"],
}
FIXTURES = {"TEXTS": "text_folder", "TARGET": "tms_target", "LANGUAGE_MODEL": "gpt_target"}


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"the sea is {number} fathoms deep\n" * 9)
    return folder


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in ("trm", "tokens", "tms") else pytest.mark.slow)
        for name in RUNS
    ]
)
def planned(request: pytest.FixtureRequest) -> list[str]:
    """The arguments of a run."""
    line = "\n".join(RUNS[request.param])
    for name, fixture in FIXTURES.items():
        if name in line:
            line = line.replace(name, str(request.getfixturevalue(fixture)))
    return line.split("\n")


def test_what_is_counted_without_numbers_is_what_a_pass_takes(
    planned: list[str], tmp_path: Path
) -> None:
    cfg = config_of(*planned, FLOAT32, f"checkpoint_path={tmp_path}")
    source = make(cfg.data, "data", RunSettings.of(cfg))

    facts: Any = SimpleNamespace(cfg=cfg, source=source)

    def counted(device: torch.device, step: bool) -> capacity.Needs:
        objective = pretrain.make_objective(cfg.arch, 0, source.spec, device)
        optimizers = build_dense(cfg.optim.dense, objective.trained())
        memory = OptimizerState(optimizers)
        if step:
            for parameter in objective.trained().values():
                parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
        remembered = memory.state() if step else memory.like({}, 1)
        return capacity.count(
            objective,
            remembered.values(),
            cfg.ema,
            partial(pretrain.Trainer.first_batch, facts, device=device),
        )

    real = counted(torch.device("cpu"), step=True)
    assert counted(capacity.META, step=False) == real
    assert real.first >= real.each > 0
    assert 0 < real.trained == real.gradients <= real.remembered
    if "arch=prefix" in planned:
        assert real.frozen > 0, "the model has no gradients, and nothing remembers it"


@pytest.mark.slow
def test_plan_show_says_it_once_and_leaves_nothing(tmp_path: Path) -> None:
    line = ["pretrain.py", *QUIET, *TINY_CNN, "plan=show", f"checkpoint_path={tmp_path}/run"]
    done = check_ended_well(run_ranks(2, line, 60))
    said = done[0].stdout.splitlines()
    assert said[0].startswith("plan: on ")
    assert "2 × host" in said[0]
    assert all(text.startswith("plan: ") for text in said)
    assert not done[1].stdout
    assert not (tmp_path / "run").exists()


def test_cards_that_are_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainer_on(ALONE, tmp_path, *TINY_TRM, "plan=show", "plan_cards=2x24+16")
    assert "torchrun --nproc-per-node 3" in capsys.readouterr().out


@pytest.mark.slow
def test_every_net_and_kind_of_data_has_a_plan(
    planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trainer_on(ALONE, tmp_path / "run", *planned, FLOAT32, "plan=show", "plan_cards=3x80")
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("plan: ") for line in lines)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_takes_about_what_was_counted(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    arguments = [
        *TINY_GPT,
        "arch.hidden_size=256",
        "arch.mlp_width=1024",
        "data.seq_len=512",
        FLOAT32,
        "compile=false",
        "device=cuda",
    ]
    trainer = trainer_on(Dist(device=device), tmp_path, *arguments)
    counted = trainer_on(Dist(device=device), tmp_path, *arguments, "plan=auto")
    assert counted.cfg.micro_batch_size == 24
    meta_net = pretrain.make_objective(trainer.cfg.arch, 0, trainer.source.spec, capacity.META)
    known = OptimizerState(build_dense(trainer.cfg.optim.dense, meta_net.trained())).like({}, 1)
    needs = capacity.count(
        meta_net,
        known.values(),
        False,
        partial(trainer.first_batch, device=capacity.META),
    )
    del counted
    torch.cuda.reset_peak_memory_stats(device)
    for step in steps_of(trainer, 3):
        step()
    expected = needs.state(1, split=False) + needs.passes(8)
    assert 0.7 * expected < torch.cuda.max_memory_allocated(device) < 1.1 * expected + 64 * 2**20
