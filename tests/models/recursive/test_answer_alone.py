"""docs/answer_alone.py, which users copy, computes what the net does."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from data.stream import to_tensors
from models.objective import saved_tensors
from tests.ranks import ROOT
from tests.runs import TINY_TRM
from tests.steps import steps_of, trainer_on
from utils.ranks.distributed import Dist

ATTENTION = ["arch.mlp_t=false", "arch.pos_encodings=rope", "arch.forward_dtype=float32"]


@pytest.mark.parametrize(
    "line",
    [
        ["arch.mlp_t=true", "arch.pos_encodings=none", "arch.forward_dtype=bfloat16"],
        ATTENTION,
        ["arch=hrm", *ATTENTION, "arch.H_cycles=2", "arch.no_ACT_continue=true"],
    ],
    ids=["TRM with an MLP", "TRM with attention", "HRM"],
)
def test_the_file_without_lockstep_has_the_same_bits(
    line: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = [key for key in TINY_TRM if not (line[0] == "arch=hrm" and key == "arch=trm")]
    trainer = trainer_on(Dist(), tmp_path / "run", *rest, *line)
    for step in steps_of(trainer, 3):
        step()
    examples = next(iter(trainer.source.eval_sets().values()))
    batch = to_tensors([examples.read(np.arange(1))])
    assert batch["puzzle_identifiers"].tolist() == [0]
    trainer.objective.eval()
    with torch.no_grad():
        expected = trainer.objective.predict(batch).outputs["logits"][0]

    weights, config = tmp_path / "model.safetensors", tmp_path / "config.yaml"
    save_file(
        {name: w.contiguous() for name, w in saved_tensors(trainer.objective).items()}, weights
    )
    config.write_text(yaml.safe_dump(trainer.cfg.plain()))
    file = str(ROOT / "docs" / "answer_alone.py")
    logits_of = runpy.run_path(file)["logits_of"]
    found = logits_of(str(weights), str(config), batch["inputs"][0].tolist())
    assert torch.equal(found, expected)

    board = "".join("?.1234"[token] for token in batch["inputs"][0].tolist())
    monkeypatch.setattr(sys, "argv", [file, str(weights), str(config), board])
    runpy.run_path(file, run_name="__main__")
    answer = "".join("?.1234"[token] for token in expected.argmax(-1).tolist())
    assert capsys.readouterr().out == f"{answer}\n"
