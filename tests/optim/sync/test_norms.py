"""The norms in the log are those of the weights that the checkpoints hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import TINY_CNN, train
from utils.checkpoint import reader

# plain gradient descent, whose update is the gradient times the rate
DESCENT = [*TINY_CNN, "optim=sgd", "beta1=0", "weight_decay=0", "lr=0.1", "max_steps=2"]


def test_logged_norms_are_those_of_the_weights(tmp_path: Path) -> None:
    keeping = ["checkpoint_interval=1", "keep=null"]
    run = train(tmp_path / "run", *DESCENT, *keeping, ranks=2)
    before, after = (
        torch.cat(
            [weight.flatten() for weight in reader.load(folder, ["model"])[0]["model"].values()]
        )
        for folder in (run.directory / "checkpoints" / f"step_{step}" for step in (1, 2))
    )
    row = next(row for row in run.rows if row["step"] == 2)
    update = float((after - before).norm())
    assert row["train/param_norm"] == pytest.approx(float(after.norm()), rel=1e-9)
    assert row["train/update_norm"] == pytest.approx(update, rel=1e-9)
    assert row["train/grad_norm"] == pytest.approx(update / row["train/lr"], rel=1e-9)
