"""pretrain.py with objectives and ways to synchronise that only tests have: `python -m
tests.ranks_unusual_objectives WHAT key=value …`.

They take the places of the digit classifier and its net, so that everything else is the real thing.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pretrain
from contract import (
    IGNORE,
    Arrays,
    Batch,
    Context,
    Noise,
    Objective,
    Prediction,
    Spec,
    StepOut,
)
from data.digits import images
from models import classify
from models.digits import cnn
from models.frozen import Frozen
from models.layers import parse_dtype
from utils.command import cli
from utils.ranks.distributed import Dist

HIDDEN = 16


class Net(nn.Module):
    """Two linear maps; it takes the keys of the net whose place it has."""

    def __init__(
        self, spec: Spec, dropout: Sequence[float] = (), forward_dtype: str = "float64"
    ) -> None:
        super().__init__()
        self.base = self.make_base()
        self.last = nn.Linear(HIDDEN, spec.num_classes)
        self.dtype = parse_dtype(forward_dtype)

    def make_base(self) -> nn.Module:
        return nn.Linear(784, HIDDEN)

    def forward(self, inputs_BHW: Tensor) -> Tensor:
        return self.last(torch.tanh(self.base(inputs_BHW.flatten(1).to(self.dtype) / 255)))


class HalfFrozenNet(Net):
    """The first half comes from a file, and would change with every batch if it were in training
    mode.
    """

    def make_base(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(784, HIDDEN), nn.BatchNorm1d(HIDDEN))
        return Frozen(net, os.environ["FROZEN"].format(rank=os.environ.get("RANK", "0")))


class SquaredError(Objective):
    """Sums squared distances from the label."""

    def error(self, batch: Batch) -> Tensor:
        labels_B = batch["labels"].long()
        known_B = labels_B != IGNORE
        wanted_BC = F.one_hot(labels_B.clamp_min(0), 10)
        return ((self.model(batch["inputs"]) - wanted_BC).square().sum(-1) * known_B).sum()

    def forward(self, batch: Batch, carry: None, ctx: Context) -> StepOut:
        return StepOut(self.error(batch), torch.tensor(len(batch["labels"])), {})

    def predict(self, batch: Batch) -> Prediction:
        answer_B, known_B = self.model(batch["inputs"]).argmax(-1), batch["labels"] != IGNORE
        return Prediction(
            {"accuracy": ((answer_B == batch["labels"]).sum(), known_B.sum())}, {"answer": answer_B}
        )


class LogOfSum(SquaredError):
    """log(1 + the error of the whole batch), of which no rank and no micro-batch knows the gradient
    by itself.
    """

    def statistics(self, batch: Batch, carry: None, ctx: Context) -> dict[str, Tensor]:
        return {"error": self.error(batch), "examples": torch.tensor(len(batch["labels"]))}

    def forward(self, batch: Batch, carry: None, ctx: Context) -> StepOut:
        error, total, examples = self.error(batch), ctx.totals["error"], ctx.totals["examples"]
        mine = len(batch["labels"])
        # The value is this micro-batch's share of the loss; the gradient is the error's, by the
        # chain rule.
        loss = mine * torch.log1p(total) + examples * (error - error.detach()) / (1 + total)
        return StepOut(loss, torch.tensor(mine), {})


class Prepared(SquaredError):
    """Begins with an image of the first batch and some noise in its weights."""

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        print("PREPARED", flush=True)
        images = [
            torch.from_numpy(source.train_batch(0, shard)["inputs"]) for shard in noise.shards
        ]
        draws = noise.normal("prepare", (len(noise.shards), 784))
        total = torch.cat(images).flatten(1).double().sum(0) / 255 + draws.double().sum(0)
        dist.all_reduce(total)
        with torch.no_grad():
            self.model.base.weight.add_(0.01 * total)


class MeanError(SquaredError):
    """A mean in place of a sum."""

    def error(self, batch: Batch) -> Tensor:
        return super().error(batch) / len(batch["labels"])


class Drawing(images.ImageSource):
    def train_batch(self, step: int, shard: int) -> Arrays:
        batch = super().train_batch(step, shard)
        noise = np.random.randint(0, 9, batch["inputs"].shape)  # noqa: NPY002 (the mistake)
        return batch | {"inputs": batch["inputs"] + noise.astype(np.uint8)}


KINDS: dict[str, tuple[type[nn.Module], type[Objective]]] = {
    "plain": (Net, SquaredError),
    "totals": (Net, LogOfSum),
    "prepared": (Net, Prepared),
    "mean": (Net, MeanError),
    "drawing": (Net, SquaredError),
    "half-frozen": (HalfFrozenNet, SquaredError),
}


def main() -> None:
    what, *arguments = sys.argv[1:]
    cnn.CNN, classify.ClassifyObjective = KINDS[what]  # type: ignore[misc,assignment]
    cnn.CNN.__module__ = cnn.__name__  # a configuration names what a module of ours defines
    classify.ClassifyObjective.__module__ = classify.__name__
    if what == "drawing":
        images.ImageSource = Drawing  # type: ignore[misc]
        Drawing.__module__ = images.__name__
        np.random.seed()  # noqa: NPY002 (a forked rank begins with the generator of another)
    sys.argv = ["pretrain.py", *arguments]
    cli.main(pretrain.app)


if __name__ == "__main__":
    main()
