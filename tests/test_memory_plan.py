"""`plan`: what it says, and whether a GPU takes what was counted; tests/models/test_objective.py
compares what is counted with a real pass.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import pretrain
from data.stream import first_batch
from models.objective import trained
from tests.making import needs_of
from tests.ranks import check_ended_well, run_ranks, words
from tests.runs import FLOAT32, QUIET, TINY_CNN, TINY_GPT, TINY_TRM
from tests.steps import steps_of, trainer_on
from trial.optimizers import remembered
from utils.plan.needs import META
from utils.ranks.distributed import Dist


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
        trainer_on(Dist(), tmp_path, *TINY_TRM, "plan=show", "plan_cards=3x16")
    assert "torchrun --nproc-per-node 3" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_takes_about_what_was_counted(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    # in float32 PyTorch has no fused kernel for shared keys on CUDA
    wide = "arch.hidden_size=256 arch.kv_heads=2 arch.mlp_width=1024 data.seq_len=512"
    arguments = [*TINY_GPT, *FLOAT32, *words(f"{wide} compile=false device=cuda")]
    trainer = trainer_on(Dist(device=device), tmp_path, *arguments)
    counted = trainer_on(Dist(device=device), tmp_path, *arguments, "plan=auto")
    assert counted.cfg.micro_batch_size == 24
    meta_net = pretrain.make_objective(trainer.cfg.arch, 0, trainer.source.spec, META)
    known = remembered(trainer.cfg.optim["dense"], trained(meta_net))
    first = partial(first_batch, trainer.source, trainer.cfg.seed, META)
    needs = needs_of(meta_net, known, False, first)
    del counted
    torch.cuda.reset_peak_memory_stats(device)
    for step in steps_of(trainer, 3):
        step()
    expected = needs.state(1, split=False) + needs.passes(8)
    assert 0.7 * expected < torch.cuda.max_memory_allocated(device) < 1.1 * expected + 64 * 2**20
