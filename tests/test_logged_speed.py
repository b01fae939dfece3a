"""The rows about speed count the right things."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import pretrain
from models.digits.classify import ClassifyObjective
from models.objective import Batch
from models.recursive.act import ActObjective
from tests.runs import QUIET, TINY_TRM, Result, config_of
from utils.measure.evaluator import Prediction

TOKENS = 784


@pytest.mark.slow
def test_examples_are_examples_whatever_a_loss_is_divided_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An objective that divides by pixels, as one of language divides by tokens."""
    score = ClassifyObjective.score

    def by_pixels(self: ClassifyObjective, logits_BC: torch.Tensor, labels_B: torch.Tensor):
        loss, weight, metrics = score(self, logits_BC, labels_B)
        return loss * TOKENS, weight * TOKENS, metrics

    monkeypatch.setattr(ClassifyObjective, "score", by_pixels)
    monkeypatch.setattr("utils.measure.hardware.tune", lambda exact: None)
    small = [
        "arch=cnn",
        "data=digits",
        "optim=adamw",
        "global_batch_size=16",
        "epochs=1",
        "eval_interval=1",
        "max_steps=2",
    ]
    pretrain.pretrain(
        config_of(
            *small,
            "num_workers=0",
            "log_interval=1",
            "wandb.mode=disabled",
            f"checkpoint_path={tmp_path}/run",
        )
    )
    rows = [row for row in Result(tmp_path / "run").rows if "speed/step_ms" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["speed/examples_per_s"] * row["speed/step_ms"] == pytest.approx(16_000)
        assert row["speed/tokens_per_s"] == row["speed/examples_per_s"], "an image is one token"


def test_speeds_leave_out_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = ActObjective.predict

    def slowly(self: ActObjective, batch: Batch) -> Prediction:
        time.sleep(2)
        return predict(self, batch)

    monkeypatch.setattr(ActObjective, "predict", slowly)
    monkeypatch.setattr("utils.measure.hardware.tune", lambda exact: None)
    steps = ["epochs=null", "eval_interval=null", "max_steps=3", "eval_every_steps=1"]
    quiet = [*QUIET, "num_workers=0", "eval_batch_size=37", f"checkpoint_path={tmp_path}/run"]
    pretrain.pretrain(config_of(*TINY_TRM, *steps, *quiet))
    times = Result(tmp_path / "run").series("speed/step_ms")
    assert len(times) == 3
    assert max(times) < 2000
